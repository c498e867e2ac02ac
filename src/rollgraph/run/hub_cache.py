"""Files of the Hugging Face Hub, in its cache on this machine: downloaded if they are not there.

Owns every call of huggingface_hub, which finds the cache, the token and offline mode in the environment (HF_HOME,
HF_HUB_CACHE, HF_TOKEN, HF_HUB_OFFLINE), and what is said when it fails. Downloads only files that are read: never
weights for a plan, nor the other splits of a dataset. A file appears in the cache whole or not at all.
"""

from __future__ import annotations

import glob
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rollgraph.files import read_object, read_text
from rollgraph.model.adapter_files import ADAPTER_WEIGHTS
from rollgraph.model.hf_weights import INDEX, WEIGHTS
from rollgraph.model.peft_config import ADAPTER_CONFIG
from rollgraph.rl.paths import import_extra
from rollgraph.run.dataset_splits import CARD, ChosenSplit, SplitError, choose_split
from rollgraph.run.hub_ids import HubError, HubId, find_id

Note = Callable[[str], None]
TRAIN = ("train",)
HELD_OUT = ("validation", "test")
_SETTINGS = (  # all but the weights of a model
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
_ONLY_SAFETENSORS = "only weights in safetensors are loaded and, without a network, only those that the cache has"
_FIRST_NOTE, _NEXT_NOTES = 2.0, 10.0  # seconds


def say_nothing(text: str) -> None:
    pass


# -- models ----------------------------------------------------------------------------------------


def model_folder(text: str, *, weights: bool = False, note: Note = say_nothing) -> Path:
    """The folder of a model, which a person named by its path or by its id on the hub."""
    found = find_id(text, "model")
    return Path(text) if found is None else fetch_model(found, weights=weights, note=note)


def fetch_model(model: HubId, *, weights: bool = False, note: Note = say_nothing) -> Path:
    """The folder in the cache that holds the settings and the tokenizer of a model and, if asked for, its weights."""
    folder = _fetch(model, _SETTINGS, note)
    if not weights:
        return folder
    names = _weight_names(folder)
    _fetch(replace(model, revision=folder.name), names, note)
    for name in names:
        if not (folder / name).exists():
            raise HubError(f"there is no {name}; {_ONLY_SAFETENSORS}", place=model.written)
    return folder


def _weight_names(folder: Path) -> list[str]:
    """The names of the files with weights. An index that makes no sense is reported by who loads them."""
    if (folder / ADAPTER_CONFIG).exists():
        return [ADAPTER_WEIGHTS]
    if not (folder / INDEX).exists():
        return [WEIGHTS]
    places = read_object(folder / INDEX).get("weight_map")
    if not isinstance(places, dict):
        return []
    return sorted({name for name in places.values() if isinstance(name, str)})


# -- datasets --------------------------------------------------------------------------------------


def data_files(text: str, splits: Sequence[str] = TRAIN) -> list[Path]:
    """The files of a dataset, which a person named by the path of a file or by its id on the hub."""
    found = find_id(text, "dataset")
    if found is None:
        return [Path(text)]
    fetched = fetch_split(found, splits)
    return [fetched.folder / name for name in fetched.split.files]


@dataclass(frozen=True)
class FetchedSplit:
    """A split of a dataset and the folder in the cache that holds its files. The folder is named like its commit."""

    folder: Path
    split: ChosenSplit


def fetch_split(dataset: HubId, splits: Sequence[str], note: Note = say_nothing) -> FetchedSplit:
    """Download the split that an id names or, if it names none, the first one of `splits` that there is."""
    folder = _fetch(dataset, [CARD, ".gitattributes"], note)  # the hub adds the latter, so there is always a file
    pinned = replace(dataset, revision=folder.name)
    card = folder / CARD
    listed = _list_files(pinned)
    files = listed
    if files is None:
        files = [path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()]
    wanted = splits if dataset.split is None else (dataset.split,)
    try:
        chosen = choose_split(files, read_text(card) if card.exists() else "", dataset.config, wanted)
    except SplitError as error:
        known = "" if listed is not None else " (by what the cache holds: the hub cannot be reached)"
        raise HubError(f"{error.detail}{known}", place=dataset.written) from None
    _fetch(pinned, [glob.escape(name) for name in chosen.files], note)
    return FetchedSplit(folder, chosen)


def _list_files(dataset: HubId) -> list[str] | None:
    """All files of the repository; None if neither the cache nor the hub can say."""
    hub = _import_hub(dataset)
    wanted = {"repo_id": dataset.repo, "repo_type": dataset.kind, "revision": dataset.revision}
    if hasattr(hub, "get_cached_repo_tree"):  # newer versions keep the list of a commit
        try:
            return [file.path for file in hub.get_cached_repo_tree(**wanted)]
        except hub.errors.CachedRepoTreeNotFoundError:
            pass
    try:
        return list(hub.HfApi().list_repo_files(**wanted))
    except (OSError, hub.errors.HTTPError):
        return None


# -- the hub ---------------------------------------------------------------------------------------


def _import_hub(wanted: HubId) -> Any:
    try:
        for part in ("constants", "errors", "utils"):  # these are not imported with the package
            import_extra(f"huggingface_hub.{part}", extra="hub")
        return import_extra("huggingface_hub", extra="hub")
    except ImportError as error:
        raise HubError(f"{_instead_of_a_path(wanted)}{error}", place=wanted.written) from error


def _fetch(wanted: HubId, patterns: Sequence[str], note: Note) -> Path:
    """The folder of a commit in the cache, with all files of the patterns that the repository has."""
    hub = _import_hub(wanted)
    errors = hub.errors

    def download(**options: Any) -> Path:
        found = hub.snapshot_download(
            wanted.repo, repo_type=wanted.kind, revision=wanted.revision, allow_patterns=list(patterns), **options
        )
        return Path(found)

    try:
        with _telling(wanted, hub, note):
            return download()
    except errors.GatedRepoError as error:
        detail = f"its authors ask you to accept their terms: do so at {_page(wanted, hub)}, then set HF_TOKEN"
        raise HubError(detail, place=wanted.written) from error
    except errors.RepositoryNotFoundError as error:
        detail = f"the hub has no {wanted.kind} of this name, or it is private and needs HF_TOKEN"
        raise HubError(f"{_instead_of_a_path(wanted)}{detail}", place=wanted.written) from error
    except errors.HFValidationError as error:
        raise HubError(
            f"{_instead_of_a_path(wanted)}the hub has no such names: {error}", place=wanted.written
        ) from error
    except errors.RevisionNotFoundError as error:
        raise HubError(f"there is no revision {wanted.revision!r}", place=wanted.written) from error
    except errors.LocalEntryNotFoundError as error:
        place = hub.constants.HF_HUB_CACHE
        detail = f"the cache ({place}) does not have all its files, and {_why_unreachable(error, hub)}"
        raise HubError(f"{_instead_of_a_path(wanted)}{detail}", place=wanted.written) from error
    except (OSError, errors.HTTPError) as error:
        raise HubError(f"the download failed: {error}", place=wanted.written) from error


def _instead_of_a_path(wanted: HubId) -> str:
    """The beginning of a message about an id that may have been meant as a path."""
    if not wanted.is_plain:
        return ""
    return f"there is no such {'folder' if wanted.kind == 'model' else 'file'} here, and "


def _page(wanted: HubId, hub: Any) -> str:
    kind = "datasets/" if wanted.kind == "dataset" else ""
    return f"{hub.constants.ENDPOINT}/{kind}{wanted.repo}"


def _why_unreachable(error: BaseException, hub: Any) -> str:
    cause = error.__cause__
    if isinstance(cause, hub.errors.OfflineModeIsEnabled):
        return "HF_HUB_OFFLINE forbids downloading them"
    reason = f" ({cause})" if cause is not None else ""
    return f"{hub.constants.ENDPOINT} cannot be reached{reason}"


# -- progress --------------------------------------------------------------------------------------


@contextmanager
def _telling(wanted: HubId, hub: Any, note: Note) -> Iterator[None]:
    """Write a line now and then while a download lasts. The bars of huggingface_hub would break a live view."""
    done = threading.Event()
    folder = Path(hub.constants.HF_HUB_CACHE) / f"{wanted.kind}s--{wanted.repo.replace('/', '--')}" / "blobs"

    def tell() -> None:
        pause = _FIRST_NOTE
        while not done.wait(pause):
            note(f"downloading {wanted.at_revision}: {_gigabytes(folder):.2f} GB in {folder.parent}")
            pause = _NEXT_NOTES

    teller = threading.Thread(target=tell, name="download notes", daemon=True)
    shown_before = not hub.utils.are_progress_bars_disabled()
    if shown_before:
        hub.utils.disable_progress_bars()
    teller.start()
    try:
        yield
    finally:
        done.set()
        teller.join()
        if shown_before:
            hub.utils.enable_progress_bars()


def _gigabytes(folder: Path) -> float:
    """The size of what was downloaded so far, unfinished files included."""
    total = 0
    for path in folder.glob("*"):
        try:
            total += path.stat().st_size
        except OSError:  # it was finished, and renamed, meanwhile
            continue
    return total / 1e9
