"""Pictures in the values of a data set: every form is read to the same bytes, and everything else is refused."""

from __future__ import annotations

import base64
import io
import json
import threading
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import pytest

from headrace.actors.engines.chat import build_chat_format
from headrace.actors.engines.tokenizer import load_tokenizer
from headrace.actors.images import prompt_pictures
from headrace.actors.images.prompt_pictures import BadPicture, Picture, parts_of, picture_of, take_pictures, upright_rgb
from headrace.actors.rollout import prompts
from headrace.actors.rollout.data_config import DataConfig
from headrace.actors.rollout.prompts import PromptStream, open_prompts
from headrace.tests.actors.images.tiny_vision import PAD, draw, encoded

PNG = encoded(draw(20, 30))
URI = f"data:image/png;base64,{base64.b64encode(PNG).decode()}"


def read(value: Any, folder: Path | None = None) -> bytes:
    return picture_of(value, "picture 0", folder=folder, allow_urls=False).read()


def test_every_form_has_the_same_bytes(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(PNG)
    forms = ["a.png", str(tmp_path / "a.png"), tmp_path / "a.png", PNG, URI, {"bytes": PNG, "path": "gone.png"}]
    forms += [f"file://{tmp_path}/a.png", f"file:{tmp_path}/a.png", {"bytes": None, "path": "a.png"}]
    assert [read(form, tmp_path) for form in forms] == [PNG] * 9
    from_pil = read(draw(20, 30))
    assert from_pil[:4] == b"\x89PNG" and from_pil == read(draw(20, 30)) == read(np.asarray(draw(20, 30)))
    wrapped = base64.encodebytes(PNG).decode().replace("+", "%2B")  # As some encoders and web forms write it.
    assert read(f"data:image/png;base64,{wrapped}") == PNG


def test_pil_images_are_read_as_their_files_are() -> None:
    turned, file = PIL.Image.Exif(), io.BytesIO()
    turned[0x0112] = 6
    draw(20, 30).save(file, "JPEG", exif=turned)
    jpeg = PIL.Image.open(io.BytesIO(file.getvalue()))
    assert PIL.Image.open(io.BytesIO(read(jpeg))).size == upright_rgb(jpeg).size == (30, 20)
    deep = PIL.Image.new("I;16", (4, 4), 40000)
    assert PIL.Image.open(io.BytesIO(read(deep))).getpixel((0, 0)) == (156, 156, 156) != (255, 255, 255)
    deep.save(png := io.BytesIO(), "PNG")
    assert upright_rgb(PIL.Image.open(png)).getpixel((0, 0)) == (156, 156, 156)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (PIL.Image.new("F", (4, 4), 0.5), "p: the PIL image cannot be read: it has mode 'F', whose numbers have no la"),
        (np.zeros((3, 20, 30)), "p: the array cannot be read: "),
        (PIL.Image.open(io.BytesIO(PNG[:60])), "p: the PIL image cannot be read: image file is truncated"),
        ("~nobody-has-this-name/a.png", "p: '.*/~nobody-has-this-name/a.png' cannot be read: No such file"),
        (None, "p: got None, expected a path, bytes, a PIL image"),
        ([1], r"p: got \[1\], expected a path"),
        ("https://example.org/a.png", r"p: got the URL 'https://example.org/a.png', expected none \(data.images.allow"),
        ("ftp://example.org/a.png", "p: got 'ftp://example.org/a.png', expected a data URI or a path"),
        ("data:text/plain,abc", "p: got a data URI that begins with 'data:text/plain,abc', expected `data:image/"),
        ("data:image/png;base64,%%", "p: the base64 text of the data URI is damaged"),
        ("data:image/png;base64,", "p: got an empty data URI"),
        ("gone.png", "p: '.*gone.png' cannot be read: No such file or directory"),
        ("iVBORw0K" * 1000, "p: '.{150,199} cannot be read: File name too long$"),
    ],
)
def test_what_is_refused(tmp_path: Path, value: Any, message: str) -> None:
    with pytest.raises(BadPicture, match=f"^{message}"):
        picture_of(value, "p", folder=tmp_path, allow_urls=False).read()


def test_an_empty_file_is_told_as_such(tmp_path: Path) -> None:
    (tmp_path / "a.png").touch()
    with pytest.raises(BadPicture, match="^picture 0: got 0 bytes from '.*a.png', expected 1 to"):
        read("a.png", tmp_path)


def test_urls_are_fetched_where_they_are_allowed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("a.png", "two words ü.png"):
        (tmp_path / name).write_bytes(PNG)

    class Quiet(SimpleHTTPRequestHandler):
        def log_message(self, format: str, *_: Any) -> None:  # noqa: A002
            pass

        def do_GET(self) -> None:
            if self.path == "/slow.png":
                self.send_response(200)
                self.end_headers()
                with suppress(ConnectionError):  # The client leaves.
                    while not ended.wait(0.02):
                        self.wfile.write(b"a")
            elif self.path.startswith("/to/"):
                self.send_response(302)
                self.send_header("Location", self.path.removeprefix("/to/"))
                self.end_headers()
            else:
                super().do_GET()

    ended = threading.Event()

    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(tmp_path))) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            url = f"http://127.0.0.1:{server.server_port}"
            for path in ("a.png", "two words ü.png", "two%20words%20%C3%BC.png", f"to/{url}/a.png"):
                assert picture_of(f"{url}/{path}", "p", folder=None, allow_urls=True).read() == PNG
            for path, said in (
                ("gone.png", "File not found"),
                ("to/ftp://127.0.0.1/a.png", "it leads to 'ftp://127.0.0.1/a.png', expected an address"),
                ("to/file:///etc/hostname", "Found - Redirection to url 'file:///etc/hostname' is not allowed"),
                ("slow.png", r"it takes more than 0\.3 s|timed out"),
            ):
                if path == "slow.png":
                    monkeypatch.setattr(prompt_pictures, "FETCH_S", 0.3)
                with pytest.raises(BadPicture, match=f"p: '.*{path}' cannot be read: ({said})"):
                    picture_of(f"{url}/{path}", "p", folder=None, allow_urls=True).read()
        finally:
            ended.set()
            server.shutdown()
            thread.join()


def test_values_that_are_not_of_the_data_set_name_no_files(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(PNG)
    assert read(URI) == PNG
    for value in (str(tmp_path / "a.png"), f"file://{tmp_path}/a.png"):
        with pytest.raises(BadPicture, match="expected bytes, a PIL image, an array of pixels or a data URI$"):
            read(value)


def test_pictures_of_messages_come_from_their_parts_and_from_the_column() -> None:
    first = {"type": "image", "image": PNG, "text": None}
    openai = {"type": "image_url", "image_url": {"url": URI}}
    parts = [first, {"type": "text", "text": "a", "image": None}, {"type": "image", "image": None}, openai]
    messages = [{"role": "system", "content": "b"}, {"role": "user", "content": parts}]
    taken = take_pictures(messages, [encoded(draw(9, 9))], "line 1", folder=None, allow_urls=False)
    assert [picture.read() for picture in taken.pictures] == [PNG, encoded(draw(9, 9)), PNG]
    assert taken.pictures[1].place == "line 1, picture 1"
    shown = {"type": "image"}
    assert taken.prompt[1] == {"role": "user", "content": [shown, {"type": "text", "text": "a"}, shown, shown]}
    for column, count in ((None, 0), ([PNG, PNG], 2)):
        with pytest.raises(BadPicture, match=f"line 1: the messages have 1 part of .* the row has {count} pictures"):
            take_pictures(messages, column, "line 1", folder=None, allow_urls=False)
    with pytest.raises(BadPicture, match="line 1: got a part of type 'video', expected text and pictures"):
        take_pictures([{"role": "user", "content": [{"type": "video"}]}], None, "line 1", folder=None, allow_urls=False)


def test_tags_in_texts_stand_for_the_pictures_of_the_column() -> None:
    """Data sets for verl and LLaVA have this form."""

    def taken(*texts: str, count: int) -> list[Any]:
        messages: list[Any] = [{"role": "user", "content": text} for text in texts]
        prompt = take_pictures(messages, [PNG] * count, "line 1", folder=None, allow_urls=False).prompt
        assert isinstance(prompt, list)
        return [message["content"] for message in prompt]

    shown, text = {"type": "image"}, {"type": "text", "text": "a"}
    assert taken("a", "<image>a<image>", "<image>", count=3) == ["a", [shown, text, shown], [shown]]
    assert taken("<image>", count=0) == ["<image>"], "it is a text like any other"
    with pytest.raises(BadPicture, match="line 1: the messages have 0 parts of type image .* has 2 pictures beside"):
        taken("<image>", count=2)
    assert parts_of("a<image>", 1) == [text, shown] and parts_of("a", 2) == [shown, shown, text]


def test_pictures_in_parts_of_other_types_are_not_lost() -> None:
    for part in ({"type": "input_image", "image_url": URI}, {"type": "text", "text": "a", "image": PNG}):
        with pytest.raises(BadPicture, match=f"^line 1: got a part of type '{part['type']}' with a picture, expected"):
            take_pictures([{"role": "user", "content": [part]}], None, "line 1", folder=None, allow_urls=False)


def test_prompts_of_a_file(tmp_path: Path, vision_tokenizer: Any) -> None:
    (tmp_path / "a.png").write_bytes(PNG)
    chat = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "count squares"}]}]
    lines = [{"prompt": chat, "images": ["a.png"], "answer": "1", "level": 3}, {"prompt": "count", "answer": "2"}]
    lines.append({"prompt": "count", "images": "a.png", "answer": "2"})
    lines.append({"prompt": "count", "image": "a.png", "answer": "2"})
    file = tmp_path / "my.jsonl"
    file.write_text("\n".join(map(json.dumps, lines)))
    config = DataConfig.model_validate({"train": str(file), "chat_template": "all", "images": {"enabled": True}})
    source = open_prompts(config, vision_tokenizer, seed=0, check_lengths=True).source
    rows = [source.row(index) for index in range(4)]
    assert [row.text.count(PAD) for row in rows] == [1, 0, 1, 1]
    assert [[picture.read() for picture in row.pictures] for row in rows] == [[PNG], [], [PNG], [PNG]]
    assert rows[0].fields == {"level": 3} and json.dumps(rows[0].messages)
    counted = config.model_copy(update={"overlong_prompts": "drop", "max_prompt_tokens": 12})
    opened = open_prompts(counted, vision_tokenizer, seed=0, check_lengths=True, added=lambda shown: 7 * len(shown))
    assert opened.source.size == 1 and "3 of 4 training prompts" in opened.notes[0]
    blind = config.model_copy(update={"images": DataConfig().images})
    with pytest.raises(ValueError, match=r"line 1 .* part of type 'image' while data.images.enabled=false"):
        open_prompts(blind, vision_tokenizer, seed=0, check_lengths=True)
    (tmp_path / "a.png").unlink()
    with pytest.raises(ValueError, match=r"data: line 1 of .*, picture 0: '.*a.png' cannot be read: No such file"):
        open_prompts(config, vision_tokenizer, seed=0, check_lengths=True)


def test_pictures_of_a_data_set_stay_encoded(tmp_path: Path, vision_tokenizer: Any) -> None:
    datasets = pytest.importorskip("datasets")
    images = datasets.List(datasets.Image())
    features = datasets.Features(
        {"prompt": datasets.Value("string"), "answer": datasets.Value("string"), "images": images}
    )
    rows = {"prompt": ["count"], "answer": ["1"], "images": [[{"bytes": PNG, "path": None}]]}
    datasets.Dataset.from_dict(rows, features=features).save_to_disk(tmp_path / "set")
    images_on = {"enabled": True}
    config = DataConfig.model_validate({"train": str(tmp_path / "set"), "chat_template": "all", "images": images_on})
    source = open_prompts(config, vision_tokenizer, seed=0, check_lengths=True).source
    assert [picture.read() for picture in source.row(0).pictures] == [PNG], (
        "the file itself, not one made of its pixels"
    )


def test_the_start_checks_only_the_first_prompts_with_pictures(
    tmp_path: Path, vision_tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rest fail when they come, with the same sentence; those that the user drops are all counted."""
    monkeypatch.setattr(prompts, "CHECKED_WITH_PICTURES", 2)
    (tmp_path / "a.png").write_bytes(PNG)
    lines = [{"prompt": "count", "image": "a.png", "answer": "1"} for _ in range(5)]
    lines[3]["prompt"] = "count " * 20
    file, counted = tmp_path / "my.jsonl", list[int]()
    file.write_text("\n".join(map(json.dumps, lines)))

    def added(shown: Sequence[Picture]) -> int:
        counted.append(len(shown))
        return 4

    given = {"train": str(file), "chat_template": "all", "images": {"enabled": True}, "max_prompt_tokens": 16}
    config = DataConfig.model_validate(given)
    opened = open_prompts(config, vision_tokenizer, seed=0, check_lengths=True, added=added)
    assert counted == [1, 1] and opened.source.size == 5
    assert "only the first 2 of 5 training prompts" in opened.notes[0]
    late = PromptStream(opened.source, shuffle=False)[3]
    assert late.place == f"line 4 of {str(file)!r}"
    dropping = config.model_copy(update={"overlong_prompts": "drop"})
    opened = open_prompts(dropping, vision_tokenizer, seed=0, check_lengths=True, added=added)
    assert len(counted) == 7 and opened.source.size == 4 and "1 of 5 training prompts" in opened.notes[0]
    assert PromptStream(opened.source, shuffle=False)[3].place == f"line 5 of {str(file)!r}"


def test_a_template_that_takes_only_parts_gets_texts_as_parts(tmp_path: Path, vision_folder: str) -> None:
    """Such a template walks through the letters of a text, and shows none of them."""
    tokenizer = load_tokenizer(vision_folder)
    file = tmp_path / "my.jsonl"
    file.write_text(json.dumps({"prompt": [{"role": "user", "content": "count a"}], "answer": "1"}))
    config = DataConfig.model_validate({"train": str(file), "images": {"enabled": True}})
    usual = open_prompts(config, tokenizer, seed=0, check_lengths=True).source.row(0)
    template = tokenizer.chat_template
    tokenizer.chat_template = "{% for m in messages %}{% for p in m.content %}{{ p.text }} {% endfor %}{% endfor %}"
    found = open_prompts(config, tokenizer, seed=0, check_lengths=True).source.row(0)
    chat = build_chat_format(tokenizer, "template", {}, {})
    asked = [{"role": "user", "content": "count"}, {"role": "assistant", "content": "b"}]
    ids = chat.render([*asked, {"role": "user", "content": [{"type": "text", "text": "a"}]}])
    assert ids == tokenizer("count b a", add_special_tokens=False)["input_ids"]
    assert found.text == "count a " and found.messages == usual.messages and "count a" in usual.text
    tokenizer.chat_template = template
    assert open_prompts(config, tokenizer, seed=0, check_lengths=True).source.row(0).text == usual.text
