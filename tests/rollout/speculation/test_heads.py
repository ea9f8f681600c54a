"""Copies of heads, beside a slow reading of their definition: one proposal at a time, nothing kept, nothing batched.

That the engine computes the same is what every run with TTS verifies first (``max_replica_kl``), and ``test_tts.py`` with it.
"""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn.functional import rms_norm, scaled_dot_product_attention, silu

from slipstream.rollout.speculation.head_student import HeadStudent
from slipstream.rollout.speculation.student import Followed, Lesson

H, D, V = 64, 32, 64
K = 3
EMBEDDINGS = torch.randn(V, H, generator=torch.Generator().manual_seed(4))
HEAD = torch.randn(V, H, generator=torch.Generator().manual_seed(5))
TOKENS = [int(t) for t in torch.randint(0, 63, (40,), generator=torch.Generator().manual_seed(6))]


def norm(x: Tensor, weight: Tensor) -> Tensor:
    return rms_norm(x, (x.shape[-1],), weight, 1e-6)


def rotated(x: Tensor, position: int, theta: float) -> Tensor:
    """Pairs (i, i + D/2) turned by position · theta^(−2i/D), as complex numbers."""
    pairs = torch.complex(x[..., : D // 2], x[..., D // 2 :])
    angles = position * theta ** (-torch.arange(0, D, 2).float() / D)
    turned = pairs * torch.polar(torch.ones(D // 2), angles)
    return torch.cat([turned.real, turned.imag], -1)


def layer_end(w: dict[str, Tensor], prefix: str, mixed: Tensor, residual: Tensor) -> Tensor:
    middle = residual + w[f"{prefix}self_attn.o_proj.weight"] @ mixed.flatten()
    x = norm(middle, w[f"{prefix}post_attention_layernorm.weight"])
    gated = silu(w[f"{prefix}mlp.gate_proj.weight"] @ x) * (w[f"{prefix}mlp.up_proj.weight"] @ x)
    return middle + w[f"{prefix}mlp.down_proj.weight"] @ gated


def attend(query: Tensor, keys: list[Tensor], values: list[Tensor]) -> Tensor:
    """Of one query [heads, D] on keys and values [heads, D] each."""
    stacked = (torch.stack(x, dim=1) for x in (keys, values))
    return scaled_dot_product_attention(query[:, None], *stacked)[:, 0]


def eagle3_proposal(folder: Path, features: Tensor, length: int) -> list[Tensor]:
    """Logits of the drafts that follow ``TOKENS[:length]``, where the drafts are the tokens that come there."""
    w = load_file(folder / "model.safetensors")
    keys, values, rows = [], [], []
    hidden = torch.zeros(H)
    for position in range(length - 1 + K - 1):
        hidden = w["fc.weight"] @ features[position] if position < length - 1 else hidden
        x = torch.cat([norm(EMBEDDINGS[TOKENS[position + 1]], w["midlayer.input_layernorm.weight"]),
                       norm(hidden, w["midlayer.hidden_norm.weight"])])  # fmt: skip
        q, k, v = ((w[f"midlayer.self_attn.{n}_proj.weight"] @ x).view(2, D) for n in "qkv")
        keys.append(rotated(k, position, 10_000.0))
        values.append(v)
        hidden = layer_end(w, "midlayer.", attend(rotated(q, position, 10_000.0), keys, values), hidden)
        if position >= length - 2:
            rows.append(HEAD @ norm(hidden, w["norm.weight"]))
    return rows


def dflash_proposal(folder: Path, features: Tensor, length: int) -> list[Tensor]:
    w = load_file(folder / "model.safetensors")
    block = [EMBEDDINGS[t] for t in (TOKENS[length - 1], *([63] * K))]
    for layer in ("layers.0.", "layers.1."):
        a = f"{layer}self_attn."
        keys, values, queries = [], [], []
        for position in range(length + K):
            query = position - (length - 1)
            if query < 0:
                x = norm(w["fc.weight"] @ features[position], w["hidden_norm.weight"])
            else:
                x = norm(block[query], w[f"{layer}input_layernorm.weight"])
                q = norm((w[f"{a}q_proj.weight"] @ x).view(2, D), w[f"{a}q_norm.weight"])
                queries.append(rotated(q, position, 10_000.0))
            k = norm((w[f"{a}k_proj.weight"] @ x).view(2, D), w[f"{a}k_norm.weight"])
            keys.append(rotated(k, position, 10_000.0))
            values.append((w[f"{a}v_proj.weight"] @ x).view(2, D))
        block = [layer_end(w, layer, attend(q, keys, values), x) for q, x in zip(queries, block, strict=True)]
    return [HEAD @ norm(x, w["norm.weight"]) for x in block[1:]]


def lesson(length: int, rows: int) -> Lesson:
    return Lesson(length - 1, 1.0, torch.zeros(rows, V), None)


@pytest.mark.parametrize("method", ["eagle3", "dflash"])
def test_rows_are_the_proposals(request: pytest.FixtureRequest, method: str) -> None:
    """Two readings of one request: three lessons, then two more, on prefixes of 10, 12, 15, 16 and 20 tokens."""
    folder = request.getfixturevalue(f"{method}_head")
    proposal: Callable = {"eagle3": eagle3_proposal, "dflash": dflash_proposal}[method]
    features = torch.randn(
        30, json.loads((folder / "config.json").read_text())["hidden_size"] * (3 if method == "eagle3" else 2)
    )
    borrowed = {"embed_tokens.weight": EMBEDDINGS, "lm_head.weight": HEAD}
    student = HeadStudent(method, folder, torch.device("cpu"), train="all", borrowed=borrowed, vocabulary=V, tokens=K)
    followed = Followed(tokens=TOKENS[:24])
    assert followed.append(0, features[:9]) and followed.append(9, features[9:20])
    for lengths in ([10, 12, 15], [16, 20]):
        followed.lessons = [lesson(length, rows) for length, rows in zip(lengths, (2, 3, 1), strict=False)]
        for one, rows, length in zip(followed.lessons, student.rows([followed])[0], lengths, strict=True):
            expected = torch.stack(proposal(folder, features, length)[: len(one.target_KV)])
            torch.testing.assert_close(rows, expected, rtol=1e-4, atol=1e-4)
        followed.trim()
    assert followed.prefix.length == 19 and followed.features_from == 19
    names = [name for name, _ in student.weights()]
    assert "fc.weight" in names and not set(names) & set(borrowed)
    rows.sum().backward()
    assert all(p.grad is not None for n, p in zip(names, student.parameters(), strict=True) if "norm" not in n)


def test_hidden_states_of_rejected_drafts_give_way_and_a_gap_is_noticed() -> None:
    followed = Followed()
    assert followed.append(0, torch.zeros(4, 1))
    assert followed.append(4, torch.ones(3, 1)), "three drafts were verified at 4, 5, 6"
    assert followed.append(5, 2 * torch.ones(2, 1)), "one was accepted: the next forward begins at 5"
    assert followed.features[:, 0].tolist() == [0, 0, 0, 0, 1, 2, 2]
    assert not followed.append(8, torch.zeros(1, 1))
    assert not Followed().append(3, torch.zeros(1, 1)), "a request whose beginning came from the prefix cache"


@pytest.mark.parametrize("method", ["eagle3", "dflash"])
def test_a_target_of_half_precision_lends_its_ends(request: pytest.FixtureRequest, method: str) -> None:
    """The twin is of float32; logits are in float32, with the rounding of a bfloat16 output head (8 bits)."""
    folder = request.getfixturevalue(f"{method}_head")
    found = []
    features = torch.randn(
        20, json.loads((folder / "config.json").read_text())["hidden_size"] * (3 if method == "eagle3" else 2)
    )
    for dtype in (torch.float32, torch.bfloat16):
        borrowed = {"embed_tokens.weight": EMBEDDINGS.to(dtype), "lm_head.weight": HEAD.to(dtype)}
        student = HeadStudent(method, folder, torch.device("cpu"), train="all", borrowed=borrowed, vocabulary=V, tokens=K)
        followed = Followed(tokens=TOKENS[:24], lessons=[lesson(10, 2), lesson(12, 3)])
        followed.append(0, features)
        rows = torch.cat(student.rows([followed])[0])
        rows.sum().backward()
        assert rows.dtype == torch.float32 and any(p.grad is not None for p in student.parameters())
        found.append(rows.detach())
    scale = found[0].abs().max().item()
    torch.testing.assert_close(found[1], found[0], rtol=0, atol=0.03 * scale)
