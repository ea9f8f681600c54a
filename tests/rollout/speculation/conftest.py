"""Tiny policies and drafts, and an engine that speculates, on its own event loop."""

import asyncio
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from slipstream.core.records import WeightVersion
from slipstream.core.schema import Model, Rollout, Sampling
from slipstream.core.speculation import Speculation
from slipstream.rollout.engine import Engine
from slipstream.rollout.environment import Completion
from slipstream.rollout.speculation.acceptance import Acceptance, DraftStats
from slipstream.rollout.weights import Stager, mapped_update
from slipstream.trainer.distributed import free_port, join
from slipstream.trainer.model import resolve_model
from slipstream.trainer.publisher import buckets

Prompts = Sequence[tuple[int, ...]]


class Speculating:
    """An engine with drafts, and the policy whose weights it holds.  ``temperature`` may be changed between answers."""

    def __init__(self, path: Path, speculation: Speculation, draft: Path | None, run_id: str, max_tokens: int = 48) -> None:
        if not dist.is_initialized():
            join(0, 1, "127.0.0.1", free_port(), timeout_s=60)  # the publisher gathers from all ranks
        self.policy = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
        self.version = WeightVersion(0, 0)
        self.max_tokens = max_tokens
        self.stager = Stager(run_id)
        self.runner = asyncio.Runner()
        rollout = Rollout(max_num_seqs=64, kv_cache_gib=0.5, sampling=Sampling(max_tokens=max_tokens), speculation=speculation)
        self.engine = self.run(
            Engine.start(
                path, model=Model(path=str(path)), rollout=rollout, max_length=512, eos_ids=(2,), seed=7, version=self.version,
                draft_path=draft,
            )
        )  # fmt: skip

    def run(self, call):
        return self.runner.run(asyncio.wait_for(call, 600))

    def answers(self, prompts: Prompts, temperature: float = 1.0) -> list[Completion]:
        """One answer each.  Greedy at temperature 0, which a recipe cannot ask for."""
        self.engine._sampling = Sampling(max_tokens=self.max_tokens).model_copy(update={"temperature": temperature})

        async def all_of_them() -> list[Completion]:
            calls = (self.engine.sample(p, request_id=f"{id(self)}-{i}") for i, p in enumerate(prompts))
            return list(await asyncio.gather(*calls))

        return self.run(all_of_them())

    def update(self, policy: Callable[[PreTrainedModel], None]) -> None:
        """New policy weights, as training would send them; the draft stays."""
        with torch.no_grad():
            policy(self.policy)
        self.version = self.version.next()
        count = 0
        for bucket, data, crc32 in buckets(self.policy, 1 << 18):
            self.stager.put(str(self.version), bucket, data, crc32)
            count += 1
        self.run(self.engine.commit(self.version, mapped_update(self.stager.complete(str(self.version), count))))
        self.stager.discard(str(self.version))

    def drafts(self) -> DraftStats:
        return self.run(self.engine.drafts())

    def acceptance(self) -> Acceptance:
        return self.drafts().acceptance

    def target_sha256(self) -> str:
        return self.run(self.engine._llm.collective_rpc("slipstream_target_sha256"))[0]

    def logprobs(self, prompt: Sequence[int], response: Sequence[int], t: float) -> torch.Tensor:
        """``[L, V]``, float64: the policy's distribution at each token of the response, by one transformers forward."""
        ids = torch.tensor([[*prompt, *response]])
        with torch.no_grad():
            logits = self.policy(ids, use_cache=False).logits[0, len(prompt) - 1 : -1].double()
        return (logits / t).log_softmax(-1)

    def worst_difference(self, prompts: Prompts, answers: Sequence[Completion], t: float) -> float:
        """The largest |log-prob of the engine − log-prob of transformers| over all tokens."""
        worst = 0.0
        for prompt, answer in zip(prompts, answers, strict=True):
            of_tokens = self.logprobs(prompt, answer.token_ids, t).gather(-1, torch.tensor(answer.token_ids)[:, None])[:, 0]
            worst = max(worst, (of_tokens - torch.tensor(answer.logprobs, dtype=torch.float64)).abs().max().item())
        return worst

    def uniformity(self, prompts: Prompts, answers: Sequence[Completion], t: float, bins: int = 10) -> float:
        """How well the answers fit the policy's law: the smallest p-value of the positions, times their number (Holm).

        The probability-integral transform of a token x under its exact conditional, F(x − 1) + v · p(x) with v uniform on
        [0, 1), is uniform whatever the conditional; χ² over ``bins`` equal bins at each position of the response.
        """
        noise = torch.Generator().manual_seed(0)
        ranks: list[list[float]] = [[] for _ in range(self.max_tokens)]
        for prompt, answer in zip(prompts, answers, strict=True):
            probs = self.logprobs(prompt, answer.token_ids, t).exp()
            below = probs.cumsum(-1) - probs
            chosen = torch.tensor(answer.token_ids)[:, None]
            u = below.gather(-1, chosen) + torch.rand(chosen.shape, generator=noise, dtype=torch.float64) * probs.gather(
                -1, chosen
            )
            for position, value in enumerate(u[:, 0].tolist()):
                ranks[position].append(value)
        p_values = []
        for of_position in (r for r in ranks if len(r) >= 5 * bins):
            counts = torch.histc(torch.tensor(of_position, dtype=torch.float64), bins, 0.0, 1.0)
            statistic = ((counts - len(of_position) / bins) ** 2 / (len(of_position) / bins)).sum()
            p_values.append(torch.special.gammaincc(torch.tensor((bins - 1) / 2, dtype=torch.float64), statistic / 2).item())
        assert len(p_values) >= self.max_tokens // 2, "too few samples for χ²"
        return min(p_values) * len(p_values)

    def close(self) -> None:
        self.stager.close()
        self.engine.shutdown()
        self.runner.close()


def small_qwen3(folder: Path, seed: int, *, hidden: int = 64, layers: int = 1, vocabulary: int = 64) -> Path:
    """A Qwen3 of random weights, without tokenizer."""
    config = Qwen3Config(
        vocab_size=vocabulary, hidden_size=hidden, intermediate_size=2 * hidden, num_hidden_layers=layers,
        num_attention_heads=2, num_key_value_heads=1, head_dim=32, max_position_embeddings=2048, tie_word_embeddings=False,
        bos_token_id=1, eos_token_id=2, pad_token_id=0, initializer_range=0.08,
    )  # fmt: skip
    torch.manual_seed(seed)
    Qwen3ForCausalLM(config).float().save_pretrained(folder)
    return folder


def _head(folder: Path, config: dict, shapes: dict[str, tuple[int, ...]], norms: tuple[str, ...], layers: int) -> Path:
    """Random weights of a head: linear layers, norms of ones, and ``layers`` decoder layers under their prefix's names."""
    generator = torch.Generator().manual_seed(2)
    weights = {name: 0.1 * torch.randn(*shape, generator=generator) for name, shape in shapes.items()}
    width = config["hidden_size"]
    weights |= {name: torch.ones(width if "q_norm" not in name and "k_norm" not in name else 32) for name in norms}
    folder.mkdir(parents=True)
    save_file(weights, folder / "model.safetensors")
    common = {
        "intermediate_size": 128, "num_hidden_layers": layers, "num_attention_heads": 2, "num_key_value_heads": 2,
        "head_dim": 32, "max_position_embeddings": 2048, "rms_norm_eps": 1e-6, "hidden_act": "silu",
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps({**common, **config}))
    return folder


def _decoder(prefix: str, width_in: int, width: int = 64) -> dict[str, tuple[int, ...]]:
    """Shapes of one Llama decoder layer of two heads of 32."""
    return {
        **{f"{prefix}self_attn.{name}_proj.weight": (64, width_in) for name in "qkv"},
        f"{prefix}self_attn.o_proj.weight": (width, 64),
        f"{prefix}mlp.gate_proj.weight": (128, width),
        f"{prefix}mlp.up_proj.weight": (128, width),
        f"{prefix}mlp.down_proj.weight": (width, 128),
    }


@pytest.fixture(scope="session")
def deep(tmp_path_factory: pytest.TempPathFactory, tiny: Path) -> Path:
    """A policy of four layers of 64, since heads read three of them; 64 tokens, the tokenizer of ``builtin:tiny``."""
    folder = small_qwen3(tmp_path_factory.mktemp("deep"), seed=3, layers=4)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_bytes((tiny / name).read_bytes())
    return folder


@pytest.fixture(scope="session")
def eagle3_head(tmp_path_factory: pytest.TempPathFactory) -> Path:
    shapes = {"fc.weight": (64, 192), "lm_head.weight": (64, 64), **_decoder("midlayer.", 128)}
    norms = ("norm.weight", *(f"midlayer.{n}.weight" for n in ("hidden_norm", "input_layernorm", "post_attention_layernorm")))
    config = {
        "architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "hidden_size": 64, "vocab_size": 64,
        "draft_vocab_size": 64, "eagle_aux_hidden_state_layer_ids": [1, 2, 3],
    }  # fmt: skip
    return _head(tmp_path_factory.mktemp("heads") / "eagle3", config, shapes, norms, 1)


@pytest.fixture(scope="session")
def eagle3_reduced_head(tmp_path_factory: pytest.TempPathFactory, eagle3_head: Path) -> Path:
    """The same head, which drafts three of every four tokens."""
    folder = tmp_path_factory.mktemp("heads") / "reduced"
    folder.mkdir()
    ids = torch.tensor([i for i in range(64) if i % 4 != 3])
    tensors = load_file(eagle3_head / "model.safetensors")
    tensors |= {"lm_head.weight": tensors["lm_head.weight"][ids].clone(), "d2t": ids - torch.arange(len(ids))}
    save_file(tensors, folder / "model.safetensors")
    config = json.loads((eagle3_head / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "draft_vocab_size": len(ids)}))
    return folder


@pytest.fixture(scope="session")
def dflash_head(tmp_path_factory: pytest.TempPathFactory) -> Path:
    shapes = {"fc.weight": (64, 128), **_decoder("layers.0.", 64), **_decoder("layers.1.", 64)}
    of_layer = ("input_layernorm", "post_attention_layernorm", "self_attn.q_norm", "self_attn.k_norm")
    norms = ("hidden_norm.weight", "norm.weight", *(f"layers.{i}.{n}.weight" for i in (0, 1) for n in of_layer))
    config = {
        "architectures": ["DFlashDraftModel"], "model_type": "qwen3", "hidden_size": 64, "vocab_size": 64, "block_size": 5,
        "dflash_config": {"mask_token_id": 63, "target_layer_ids": [1, 2]},
    }  # fmt: skip
    return _head(tmp_path_factory.mktemp("heads") / "dflash", config, shapes, norms, 2)


@pytest.fixture(scope="session")
def translated(tmp_path_factory: pytest.TempPathFactory, tiny: Path) -> Path:
    """``builtin:tiny`` in another vocabulary: the same tokens in the opposite order, special ones aside."""
    folder = tmp_path_factory.mktemp("translated")
    order = [0, 1, 2, 3, *range(63, 3, -1)]  # new id i is old id order[i]
    model = AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.float32)
    with torch.no_grad():
        for end in (model.get_input_embeddings(), model.get_output_embeddings()):
            end.weight.copy_(end.weight[order].clone())
    model.save_pretrained(folder)
    tokenizer = json.loads((tiny / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    tokenizer["model"]["vocab"] = {token: order.index(i) for token, i in vocabulary.items()}
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    (folder / "tokenizer_config.json").write_bytes((tiny / "tokenizer_config.json").read_bytes())
    return folder


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """``builtin:tiny``: 2 layers of 128, 64 tokens."""
    return resolve_model(Model(path="builtin:tiny"), 0, tmp_path_factory.mktemp("cache"))


@pytest.fixture(scope="session")
def small_draft(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One layer of 64 for the same 64 tokens, random: it has everything to learn."""
    return small_qwen3(tmp_path_factory.mktemp("draft"), seed=1)


@pytest.fixture(scope="module")
def speculating() -> Iterator[Callable[..., Speculating]]:
    """Starts engines, and ends them with the module."""
    started: list[Speculating] = []

    def start(*arguments, **keywords) -> Speculating:
        started.append(Speculating(*arguments, **keywords))
        return started[-1]

    yield start
    for one in started:
        one.close()
