"""Models by their id on the Hugging Face hub: `OWNER/NAME` or `OWNER/NAME@REVISION`.

They are fetched once into the hub's own cache, whose folder has the commit in its name. Models and
Tasks are uploaded to it.
"""

from __future__ import annotations

import re
from pathlib import Path

from swerl.core.errors import InputError, first_line
from swerl.core.files import read_json

_ID = re.compile(r"(?P<name>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(@(?P<revision>[\w./-]+))?")
_NEEDED = ["*.json", "*.safetensors", "*.jinja", "merges.txt", "tokenizer.model"]
_OTHER_FORMATS = ["*/*", "consolidated*"]
"""Folders such as `onnx/`, and Mistral's second copy of the weights."""


def model_folder(path: Path, *, fetch: bool) -> Path:
    """Return the folder of a model; one on the hub is looked up in its cache, or fetched.

    Without `fetch`, an id that is not in the cache is returned as it is. Raises InputError if the
    hub does not have the model, or not all files that swerl needs.
    """
    match = _ID.fullmatch(str(path))
    if match is None or path.exists():
        return path
    name, revision = match["name"], match["revision"]
    command = f"hf download {name}{f' --revision {revision}' * bool(revision)} --local-dir DIR"
    try:
        from huggingface_hub import snapshot_download

        folder = snapshot_download(
            name,
            revision=revision,
            allow_patterns=_NEEDED,
            ignore_patterns=_OTHER_FORMATS,
            local_files_only=not fetch,
        )
    except Exception as error:  # the client's libraries have no common base class
        if not fetch:
            return path
        if isinstance(error, ImportError):
            raise
        raise InputError(
            f"{path} is not a folder, and the hub does not give it: {first_line(error):.200}",
            hint=f"check the id; without a network, run `{command}` elsewhere and copy DIR",
        ) from error
    faults, _ = model_faults(Path(folder))
    if faults and fetch:
        raise InputError(
            f"{name} on the hub is incomplete for swerl: {'; '.join(faults)}",
            hint="choose a model with config.json, tokenizer.json and *.safetensors",
        )
    return path if faults else Path(folder)


def model_name(folder: Path) -> str:
    """Return the id and commit of a model in the hub's cache; the name of any other folder."""
    if folder.parent.name != "snapshots":
        return folder.name
    name = folder.parent.parent.name.removeprefix("models--").replace("--", "/")
    return f"{name}@{folder.name}"


def model_faults(path: Path) -> tuple[list[str], int]:
    """Return what a model folder of this machine lacks, and the bytes of its weights."""
    if not path.is_dir():
        return [f"{path} does not exist"], 0
    names = ["config.json", "tokenizer.json"]
    index = path / "model.safetensors.index.json"
    if index.is_file():
        weights = sorted(set(read_json(index)["weight_map"].values()))
    else:
        weights = ["model.safetensors"]
    lacking = [name for name in (*names, *weights) if not (path / name).is_file()]
    faults = [f"{path} lacks {', '.join(lacking[:3])}"] if lacking else []
    if len(lacking) > 3:
        faults.append(f"{len(lacking) - 3} more")
    sizes = [(path / name).stat().st_size for name in weights if (path / name).is_file()]
    return faults, sum(sizes)


def push(source: Path, name: str, *, kind: str) -> str:
    """Upload a folder to a repository of the hub, and return its address.

    `kind` is `model` or `dataset`. A new repository is private. The login is that of `hf auth
    login`, or the variable HF_TOKEN. Raises InputError if the hub does not take it.
    """
    require_id(name)
    from huggingface_hub import HfApi

    try:
        api = HfApi()
        address = api.create_repo(name, repo_type=kind, private=True, exist_ok=True)
        api.upload_folder(repo_id=name, repo_type=kind, folder_path=source)
    except Exception as error:
        raise InputError(
            f"the hub does not take {name}: {first_line(error):.200}",
            hint="what was written here stays; log in with `hf auth login` as one who may write",
        ) from error
    return str(address)


def require_id(name: str) -> None:
    """Raise InputError unless a text is the id of a repository."""
    match = _ID.fullmatch(name)
    if match is None or match["revision"]:
        raise InputError(f"{name!r} is not the id of a repository", hint="write OWNER/NAME")
