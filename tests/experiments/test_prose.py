"""The text that language models are finetuned on: what is read, what is held out, and how its tokens are kept."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")
pytest.importorskip("matplotlib")

from experiments import prose


def letters(text):
    return [ord(letter) for letter in text]


def test_tokens_are_kept_and_read(monkeypatch, tmp_path):
    monkeypatch.setattr(
        prose, "texts", lambda held_out, packages, documents: ["ab", "c"] if held_out else [packages, documents[-1:]]
    )
    kept, documents = str(tmp_path / "tokens.npz"), tmp_path / "documents"
    for name in ("two-2.0", "one-1.0"):
        (documents / name).mkdir(parents=True)
    first = prose.tokens(letters, kept, "def", str(documents))
    assert [part.tolist() for part in first[:2]] == [[0, 100, 101, 102, 0, 115], [0, 97, 98, 0, 99]]
    assert first.documents == "one-1.0;two-2.0"
    again = prose.tokens(lambda text: pytest.fail("encoded twice"), kept, "def", "")
    assert [part.tolist() for part in again[:2]] == [part.tolist() for part in first[:2]]
    assert again.documents == first.documents
    assert prose.tokens(letters, "", "def", "").documents == ""
    with pytest.raises(SystemExit) as caught:
        prose.tokens(letters, kept, "ghi", "")
    assert str(caught.value) == f"{kept} has the text of --packages def, not ghi"


def test_kept_tokens_are_those_of_the_folder_of_documents(monkeypatch, tmp_path):
    monkeypatch.setattr(prose, "texts", lambda held_out, packages, documents: ["a"])
    kept, documents, empty = str(tmp_path / "tokens.npz"), tmp_path / "documents", tmp_path / "empty"
    (documents / "one-1.0").mkdir(parents=True)
    empty.mkdir()
    first = prose.tokens(letters, kept, "def", str(documents))
    assert first.documents == "one-1.0"
    for folder in (documents, tmp_path / "on another host"):
        assert prose.tokens(letters, kept, "def", str(folder)).documents == first.documents
    with pytest.raises(SystemExit) as caught:
        prose.tokens(letters, kept, "def", str(empty))
    assert str(caught.value) == f"{kept} has the text of --documents with one-1.0, not with nothing"
    prose.tokens(letters, str(tmp_path / "plain.npz"), "def", "")
    with pytest.raises(SystemExit) as caught:
        prose.tokens(letters, str(tmp_path / "plain.npz"), "def", str(documents))
    assert str(caught.value) == f"{tmp_path}/plain.npz has the text of --documents with nothing, not with one-1.0"


def test_nothing_held_out_is_trained_on(monkeypatch, tmp_path):
    held_out = prose.texts(held_out=True)
    shared, fresh = held_out[0].split("\n\n")[0], " ".join(["Words that no other text has."] * 10)
    (tmp_path / "module.py").write_text(f'"""{fresh}\n\n{shared}\n"""\n\n\ndef short():\n    """Too short."""\n')
    (tmp_path / "broken.py").write_text(f'"""{fresh}"""\nnot python at all')
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "left_out.py").write_text(f'"""{fresh}"""')
    assert [prose.plain(text) for text in prose.docstrings(tmp_path)] == [prose.plain(f"{fresh} {shared}")]
    monkeypatch.setattr(prose.sysconfig, "get_path", lambda name: str(tmp_path))
    package, more = tmp_path / "site-packages" / "a_package", " ".join(["Words of a package."] * 20)
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(f'"""{more}"""')
    monkeypatch.syspath_prepend(package.parent)
    training = prose.texts(held_out=False, packages="a_package")
    assert training[-2:] == [fresh, more]
    paragraphs = [prose.plain(p) for text in training for p in text.split("\n\n")]
    assert len(paragraphs) == len(set(paragraphs))
    assert not {prose.plain(p) for text in held_out for p in text.split("\n\n")} & set(paragraphs)


def test_documents_are_pages_of_words_without_what_they_quote(monkeypatch, tmp_path):
    """In other markup too."""
    words = prose.re.findall(r"[a-z0-9]+", " ".join(prose.texts(held_out=True)).lower())
    quotation = " ".join(f"``{word}``" for word in words[20 : 20 + prose.RUN]) + " and more " * 20
    nearly, own = " ".join(words[20 : 20 + prose.RUN - 1]) + " and more" * 20, " ".join(["Something else is said here."] * 9)
    archive = tmp_path / "archive-1.0"
    (archive / "docs").mkdir(parents=True)
    (archive / "docs" / "page.rst").write_text(f"{own}\n\n{quotation}\n\n{nearly}\n\n{own}")
    (archive / "table.txt").write_text("0.25 1.75 2.5\n" * 50)
    (archive / "short.md").write_text("A title")
    (archive / "module.py").write_text(f'"""{own[::-1]}"""')
    monkeypatch.setattr(prose.sysconfig, "get_path", lambda name: str(tmp_path / "nowhere"))
    without = prose.texts(held_out=False, packages="linattn")
    found = prose.texts(held_out=False, packages="linattn", documents=str(tmp_path))
    assert found[: len(without)] == without
    assert found[len(without) :] == [f"{own}\n\n{nearly}", own[::-1]]


def test_a_package_whose_text_is_not_here_is_named():
    with pytest.raises(SystemExit) as caught:
        prose.texts(held_out=False, packages="numpy;no_such_package")
    assert str(caught.value) == "--packages names no_such_package, which is no package that is installed"
    for module in ("typing_extensions", "sys", "no_such.package"):
        with pytest.raises(SystemExit, match=f"^--packages names {module}, which is no package"):
            prose.folder_of(module)
