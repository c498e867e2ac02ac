"""The Hugging Face Hub: parses ids, and downloads models and datasets into its cache on this machine.

At the end, the rows of a data key: of a file, of a dataset of the hub, or of a Python object.
"""

from __future__ import annotations

import glob
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, Self

from rollgraph.config import Config
from rollgraph.config.fields import name_key_in_errors
from rollgraph.errors import InvalidInput
from rollgraph.files import read_json_object, read_text
from rollgraph.model.weights.adapter_files import ADAPTER_WEIGHTS
from rollgraph.model.weights.hf import INDEX, WEIGHTS
from rollgraph.model.weights.peft_config import ADAPTER_CONFIG
from rollgraph.rl.data.dataset_splits import CARD, ChosenSplit, SplitError, choose_split
from rollgraph.rl.data.python_objects import PYTHON_PREFIX, PythonObjects
from rollgraph.rl.data.rows import READERS, DataError, Row, load_rows
from rollgraph.rl.paths import import_extra

# -- ids -------------------------------------------------------------------------------------------
# Owns the syntax of ids, and the rule for texts that could be both: a path that exists always wins. No network needed.

RepoKind = Literal["model", "dataset"]
SCHEME = "hf://"
RUNS_FOLDER = Path(Config.output).parent
_PREFIXES: dict[RepoKind, str] = {"model": "", "dataset": "datasets/"}
_SPELLINGS: dict[RepoKind, str] = {
    "model": "org/name or org/name@revision",
    "dataset": "org/name, org/name:split or org/name@revision:config/split",
}
_ID = re.compile(
    r"(?P<repo>\w[\w.-]*/\w[\w.-]*)"
    r"(@(?P<revision>[^\s@:]+))?"
    r"(:((?P<config>[^\s:/]+)/)?(?P<split>[^\s:/]+))?",
    re.ASCII,
)
_COMMIT = re.compile(r"[0-9a-f]{40}")


class HubError(InvalidInput):
    """A repository of the hub that cannot be used; `location` is its id."""


@dataclass(frozen=True)
class HubId:
    """The id of a model, or of a split of a dataset.

    >>> HubId("dataset", "openai/gsm8k", "main", config="main", split="test")
    """

    kind: RepoKind
    repo: str
    revision: str = "main"  # a branch, a tag or a commit
    config: str | None = None
    split: str | None = None
    original: str = ""  # the text that was parsed, for error messages

    @classmethod
    def parse(cls, text: str, kind: RepoKind) -> Self | None:
        """Parse an id; None if the text is no id. Raises if it begins with hf:// but is no id."""
        lacks_scheme = not text.startswith(SCHEME)
        body = text.removeprefix(SCHEME)
        if not lacks_scheme:
            body = body.removeprefix(_PREFIXES[kind])
        match = _ID.fullmatch(body)
        if match is None or (kind == "model" and match["split"]):
            if lacks_scheme:
                return None
            raise HubError(f"expected {SCHEME}{_PREFIXES[kind]}{_SPELLINGS[kind]}", location=text)
        return cls(kind, match["repo"], match["revision"] or "main", match["config"], match["split"], text)

    @property
    def lacks_scheme(self) -> bool:
        """Whether it was written without hf://, and so may have been meant as a path."""
        return not self.original.startswith(SCHEME)

    @property
    def looks_like_path(self) -> bool:
        """Whether a path was meant although it does not exist: its parent exists, or is the default folder of runs."""
        folder = Path(self.repo).parent
        return self.lacks_scheme and (folder.is_dir() or folder == RUNS_FOLDER)

    @property
    def is_pinned(self) -> bool:
        """Whether it names a commit, whose files never change."""
        return is_commit(self.revision)

    @property
    def at_revision(self) -> str:
        """The repository at its revision, without config and split."""
        return f"{SCHEME}{_PREFIXES[self.kind]}{self.repo}@{self.revision}"

    def __str__(self) -> str:
        if self.split is None:
            return self.at_revision
        part = self.split if self.config is None else f"{self.config}/{self.split}"
        return f"{self.at_revision}:{part}"


def is_commit(revision: str) -> bool:
    return _COMMIT.fullmatch(revision) is not None


def find_hub_id(text: str, kind: RepoKind) -> HubId | None:
    """The id that a text stands for; None for the path of a file or folder, even if it does not exist."""
    if text.startswith(SCHEME):
        return HubId.parse(text, kind)
    if Path(text).exists() or (kind == "dataset" and Path(text).suffix in READERS):
        return None
    return HubId.parse(text, kind)


# -- files -----------------------------------------------------------------------------------------
# Owns every call of huggingface_hub, and the error messages when it fails. The package reads the cache, the token and
# offline mode from the environment (HF_HOME, HF_HUB_CACHE, HF_TOKEN, HF_HUB_OFFLINE). We download only files that we
# read: no weights for a plan, and no other splits of a dataset. A file appears in the cache completely or not at all.

Note = Callable[[str], None]
TRAIN_SPLITS = ("train",)
VALIDATION_SPLITS = ("validation", "test")
_CONFIG_FILES = (  # all files of a model that we read, except weights
    "config.json",
    "generation_config.json",
    INDEX,
    ADAPTER_CONFIG,
    ADAPTER_WEIGHTS,  # small
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "additional_chat_templates/*.jinja",
)
_ONLY_SAFETENSORS = "only weights in safetensors are loaded and, without a network, only those in the cache"
_FIRST_NOTE, _NEXT_NOTES = 2.0, 10.0  # seconds


def ignore_note(text: str) -> None:
    pass


# -- models ----------------------------------------------------------------------------------------


def model_folder(text: str, *, weights: bool = False, note: Note = ignore_note) -> Path:
    """The folder of a model, from its path or its id on the hub."""
    hub_id = find_hub_id(text, "model")
    return Path(text) if hub_id is None else fetch_model(hub_id, weights=weights, note=note)


def fetch_model(model: HubId, *, weights: bool = False, note: Note = ignore_note) -> Path:
    """Download a model's configuration and tokenizer, and its weights if `weights`; returns the folder in the cache."""
    folder = _fetch(model, _CONFIG_FILES, note)
    if not weights:
        return folder
    names = _weight_names(folder)
    _fetch(replace(model, revision=folder.name), names, note)
    for name in names:
        if not (folder / name).exists():
            raise HubError(f"there is no {name}; {_ONLY_SAFETENSORS}", location=model.original)
    return folder


def _weight_names(folder: Path) -> list[str]:
    """The names of the files with weights. A malformed index is reported by the code that loads them."""
    if (folder / ADAPTER_CONFIG).exists():
        return [ADAPTER_WEIGHTS]
    if not (folder / INDEX).exists():
        return [WEIGHTS]
    weight_map = read_json_object(folder / INDEX).get("weight_map")
    if not isinstance(weight_map, dict):
        return []
    return sorted({name for name in weight_map.values() if isinstance(name, str)})


# -- datasets --------------------------------------------------------------------------------------


def data_files(text: str, splits: Sequence[str] = TRAIN_SPLITS) -> list[Path]:
    """The files of a dataset, from the path of a file or an id on the hub."""
    hub_id = find_hub_id(text, "dataset")
    if hub_id is None:
        return [Path(text)]
    fetched = fetch_split(hub_id, splits)
    return [fetched.folder / name for name in fetched.split.files]


@dataclass(frozen=True)
class FetchedSplit:
    """A downloaded split of a dataset, and the folder in the cache with its files. The folder's name is the commit."""

    folder: Path
    split: ChosenSplit


def fetch_split(dataset: HubId, splits: Sequence[str], note: Note = ignore_note) -> FetchedSplit:
    """Download the split that an id names or, if it names none, the first of `splits` that the dataset has."""
    folder = _fetch(dataset, [CARD, ".gitattributes"], note)  # the hub adds .gitattributes, so there is always a file
    pinned = replace(dataset, revision=folder.name)
    card = folder / CARD
    listed_files = _list_files(pinned)
    files = listed_files
    if files is None:
        files = [path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()]
    split_names = splits if dataset.split is None else (dataset.split,)
    try:
        chosen = choose_split(files, read_text(card) if card.exists() else "", dataset.config, split_names)
    except SplitError as error:
        suffix = "" if listed_files is not None else " (by what the cache holds: the hub cannot be reached)"
        raise HubError(f"{error.detail}{suffix}", location=dataset.original) from None
    _fetch(pinned, [glob.escape(name) for name in chosen.files], note)
    return FetchedSplit(folder, chosen)


def _list_files(dataset: HubId) -> list[str] | None:
    """All files of the repository; None if neither the cache nor the hub can list them."""
    hub = _import_hub(dataset)
    repo_options = {"repo_id": dataset.repo, "repo_type": dataset.kind, "revision": dataset.revision}
    if hasattr(hub, "get_cached_repo_tree"):  # newer versions cache the list of a commit
        try:
            return [file.path for file in hub.get_cached_repo_tree(**repo_options)]
        except hub.errors.CachedRepoTreeNotFoundError:
            pass
    try:
        return list(hub.HfApi().list_repo_files(**repo_options))
    except (OSError, hub.errors.HTTPError):
        return None


# -- the hub ---------------------------------------------------------------------------------------


def _import_hub(hub_id: HubId) -> Any:
    try:
        for part in ("constants", "errors", "utils"):  # importing the package does not import these
            import_extra(f"huggingface_hub.{part}", extra="hub")
        return import_extra("huggingface_hub", extra="hub")
    except ImportError as error:
        raise _unusable(hub_id, str(error)) from error


def _fetch(hub_id: HubId, patterns: Sequence[str], note: Note) -> Path:
    """Download the files of a repository that match `patterns`; returns the folder of the commit in the cache."""
    hub = _import_hub(hub_id)
    errors = hub.errors

    def download(**options: Any) -> Path:
        folder = hub.snapshot_download(
            hub_id.repo, repo_type=hub_id.kind, revision=hub_id.revision, allow_patterns=list(patterns), **options
        )
        return Path(folder)

    try:
        with _report_progress(hub_id, hub, note):
            return download()
    except errors.GatedRepoError as error:
        detail = f"its authors ask you to accept their terms: do so at {_page_url(hub_id, hub)}, then set HF_TOKEN"
        raise HubError(detail, location=hub_id.original) from error
    except errors.RepositoryNotFoundError as error:
        detail = f"the hub has no {hub_id.kind} of this name, or it is private and needs HF_TOKEN"
        raise _unusable(hub_id, detail) from error
    except errors.HFValidationError as error:
        raise _unusable(hub_id, f"this is not a valid id of the hub: {error}") from error
    except errors.RevisionNotFoundError as error:
        raise HubError(f"there is no revision {hub_id.revision!r}", location=hub_id.original) from error
    except errors.LocalEntryNotFoundError as error:
        cache = hub.constants.HF_HUB_CACHE
        detail = f"the cache ({cache}) does not have all its files, and {_why_unreachable(error, hub)}"
        raise _unusable(hub_id, detail) from error
    except (OSError, errors.HTTPError) as error:
        raise HubError(f"the download failed: {error}", location=hub_id.original) from error


def _unusable(hub_id: HubId, detail: str) -> HubError:
    """An error for an id that may have been meant as a path; if it looks like one, the message leaves out the hub."""
    if hub_id.lacks_scheme:
        missing = f"there is no such {'folder' if hub_id.kind == 'model' else 'file'}"
        detail = f"{missing} (in {Path.cwd()})" if hub_id.looks_like_path else f"{missing} here, and {detail}"
    return HubError(detail, location=hub_id.original)


def _page_url(hub_id: HubId, hub: Any) -> str:
    kind = "datasets/" if hub_id.kind == "dataset" else ""
    return f"{hub.constants.ENDPOINT}/{kind}{hub_id.repo}"


def _why_unreachable(error: BaseException, hub: Any) -> str:
    cause = error.__cause__
    if isinstance(cause, hub.errors.OfflineModeIsEnabled):
        return "HF_HUB_OFFLINE forbids downloading them"
    reason = f" ({cause})" if cause is not None else ""
    return f"{hub.constants.ENDPOINT} cannot be reached{reason}"


# -- progress --------------------------------------------------------------------------------------


@contextmanager
def _report_progress(hub_id: HubId, hub: Any, note: Note) -> Iterator[None]:
    """Note the progress of a download every few seconds. huggingface_hub's bars would break the live progress."""
    is_done = threading.Event()
    folder = Path(hub.constants.HF_HUB_CACHE) / f"{hub_id.kind}s--{hub_id.repo.replace('/', '--')}" / "blobs"

    def report() -> None:
        pause = _FIRST_NOTE
        while not is_done.wait(pause):
            note(f"downloading {hub_id.at_revision}: {_gigabytes(folder):.2f} GB in {folder.parent}")
            pause = _NEXT_NOTES

    reporter = threading.Thread(target=report, name="download notes", daemon=True)
    bars_were_enabled = not hub.utils.are_progress_bars_disabled()
    if bars_were_enabled:
        hub.utils.disable_progress_bars()
    reporter.start()
    try:
        yield
    finally:
        is_done.set()
        reporter.join()
        if bars_were_enabled:
            hub.utils.enable_progress_bars()


def _gigabytes(folder: Path) -> float:
    """The size of the downloaded files so far, including unfinished ones."""
    total = 0
    for path in folder.glob("*"):
        try:
            total += path.stat().st_size
        except OSError:  # it was finished and renamed meanwhile
            continue
    return total / 1e9


# -- rows ------------------------------------------------------------------------------------------


def read_training_rows(config: Config, objects: PythonObjects) -> Sequence[Row]:
    with name_key_in_errors("data.train"):
        return read_data_rows(config.data.train, TRAIN_SPLITS, objects)


def read_validation_rows(config: Config, objects: PythonObjects) -> Sequence[Row] | None:
    """The first rows of the validation data; None if the configuration names none."""
    if config.data.validation is None:
        return None
    with name_key_in_errors("data.validation"):
        return read_data_rows(config.data.validation, VALIDATION_SPLITS, objects)[: config.validation.max_prompts]


def read_data_rows(name: str, splits: Sequence[str], objects: PythonObjects) -> Sequence[Row]:
    """The rows of a data key; for a dataset of the hub, those of the first of `splits` that it has."""
    if name in objects.rows:
        return objects.rows[name]
    if name.startswith(PYTHON_PREFIX):
        detail = "a Python program gave these rows: run it again, or name a file that holds the same rows"
        raise DataError(detail, location=name)
    return load_rows(*data_files(name, splits))
