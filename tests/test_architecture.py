"""Who may import whom, checked on the source without importing it.

The table below is the architecture. A file imports from the layers before its own and, in its own layer,
from the entries before it; in a layer of `independent` parts, only from its own part. An `__init__.py`
comes after all files of its package. An import in a function or under TYPE_CHECKING counts like any other.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

PACKAGE = "rollgraph"
SOURCE = Path(__file__).parents[1] / "src" / PACKAGE
BASE = frozenset({"torch", "numpy", "safetensors", "tokenizers"})
STARTERS = "starters/"  # programs for users to copy, which nothing imports


@dataclass(frozen=True)
class Layer:
    """Files in import order; an entry ending in `/` is a folder whose files may import one another."""

    name: str
    files: tuple[str, ...]
    packages: frozenset[str] | None  # what it may import beside the standard library; None is anything
    independent: bool = False  # its parts (a package, or a file that is in none) do not know each other
    of_graph: frozenset[str] | None = None  # the only files of graph/ it may import; None is any


# fmt: off
LAYERS = (
    Layer("values", (
        "errors.py", "files.py", "types.py",
        "config/limits.py", "config/problems.py", "config/algorithm_names.py", "config/field_types.py",
        "config/yaml_tree.py", "config/inheritance.py", "config/reader.py", "config/printing.py",
        "config/key_types.py", "config/cluster_keys.py", "config/reward_keys.py", "config/train_keys.py",
        "config/keys.py", "config/rules.py",
        "config/loading.py", "config/keywords.py",
        "distributed/exit_codes.py", "distributed/lost_ranks.py", "distributed/announcements.py",
        "distributed/connection.py", "distributed/liveness.py", "distributed/links.py", "distributed/world.py",
        "distributed/pieces.py",
        "telemetry/jsonl.py", "telemetry/metrics.py", "telemetry/token_values.py", "telemetry/samples.py",
        "telemetry/sinks.py",
        "telemetry/view.py", "telemetry/plain_view.py", "telemetry/run_picture.py", "telemetry/live_view.py",
        "telemetry/notebook_view.py", "telemetry/terminal.py",
    ), packages=frozenset()),
    Layer("graph", (
        "graph/errors.py", "graph/hooks.py", "graph/surface.py", "graph/static_outputs.py", "graph/report.py",
        "graph/pool_memory.py",
        "graph/pool.py", "graph/live_objects.py", "graph/operation_mode.py",
        "graph/undo_log.py", "graph/transaction.py", "graph/bytecode.py",
        "graph/names.py", "graph/slots.py", "graph/binding.py", "graph/bound_gradients.py", "graph/direct_sums.py",
        "graph/backend.py", "graph/cuda_backend.py", "graph/tape_program.py", "graph/tape.py", "graph/observer.py",
        "graph/autograd_leaves.py", "graph/output_tree.py", "graph/captured.py", "graph/capture_steps.py",
        "graph/function_variant.py", "graph/function_recorder.py", "graph/capture.py", "graph/schedule.py",
        "graph/saved_versions.py", "graph/passes.py", "graph/segment.py", "graph/segment_recorder.py",
        "graph/callables.py",
        "graph/sanitizer/kinds.py", "graph/sanitizer/findings.py", "graph/sanitizer/referrers.py",
        "graph/sanitizer/operation_trace.py", "graph/sanitizer/divergence.py", "graph/sanitizer/output_poisoning.py",
        "graph/sanitizer/unrecorded_hooks.py", "graph/sanitizer/snapshot.py", "graph/sanitizer/line_search.py",
        "graph/sanitizer/eager_reference.py", "graph/sanitizer/session.py",
        "graph/sanitizer/instrumented_recording.py", "graph/sanitizer/instrumented_backend.py",
        "graph/sanitizer/diagnosis.py", "graph/sanitizer/interceptors.py", "graph/sanitizer/sanitizer.py",
    ), packages=BASE),
    Layer("parts", (
        "sharding/bucket_plan.py", "sharding/state_memory.py", "sharding/ring_plan.py", "sharding/frozen_parts.py",
        "sharding/flat_buffer.py", "sharding/host_staging.py",
        "sharding/collectives.py", "sharding/rank_grid.py", "sharding/tensor_peers.py", "sharding/same_model.py",
        "sharding/bucket_sync.py", "sharding/background_tasks.py", "sharding/step_abort.py",
        "sharding/parameter_gathers.py",
        "sharding/gradient_reductions.py", "sharding/gradient_sums.py", "sharding/ring.py",
        "sharding/ring_gradients.py", "sharding/full_copy.py", "sharding/held_parameters.py", "sharding/hook_set.py",
        "sharding/model_hooks.py", "sharding/sharded_model.py", "sharding/schedules.py",
        "sharding/moment_kernels.py", "sharding/moment_codecs.py", "sharding/pinned_memory.py",
        "sharding/copy_streams.py", "sharding/optimizer_state.py", "sharding/optimizer.py", "sharding/manifest.py",
        "sharding/shard_snapshot.py", "sharding/checkpoint_writer.py", "sharding/saved_layout.py",
        "sharding/saved_state.py",
        "sharding/checkpoint_loader.py",
        "sharding/peer_choice.py", "sharding/peer_copies.py", "sharding/peer_exchange.py",
        "model/kernel_compilation.py", "model/shapes_only.py",
        "model/config_fields.py", "model/rope.py", "model/architecture.py",
        "model/chained_launch.py", "model/attention_kernels.py", "model/shared_keys_kernels.py",
        "model/decode_kernels.py", "model/attention_backward_kernels.py",
        "model/tiled_attention.py", "model/packed_attention.py", "model/attention.py",
        "model/matmul_kernels.py", "model/operators.py", "model/sum_kernels.py",
        "model/cublas_offers.py", "model/product_trials.py",
        "model/library_choice.py", "model/products.py", "model/route_cache.py", "model/tensor_group.py",
        "model/vocabulary_parts.py", "model/logprob_kernels.py", "model/logprobs.py",
        "model/low_rank.py", "model/adapter_kernels.py", "model/linear.py",
        "model/pointwise_kernels.py", "model/pointwise.py", "model/head_kernels.py", "model/adapted_head_kernels.py",
        "model/hf_names.py", "model/adapters.py", "model/recompute.py",
        "model/embedding_kernels.py", "model/embedding.py",
        "model/decoder.py", "model/division.py", "model/attention_probe.py", "model/product_probe.py",
        "model/weight_stream.py", "model/hf_weights.py",
        "model/peft_config.py", "model/hf_saving.py", "model/adapter_files.py",
        "tokenizer/files.py", "tokenizer/chat_template.py", "tokenizer/tokenizer.py", "tokenizer/byte_tokenizer.py",
        "tokenizer/chat_replies.py", "tokenizer/detokenizer.py", "tokenizer/megatron_view.py",
    ), packages=BASE, independent=True,
        of_graph=frozenset({"graph/errors.py", "graph/hooks.py", "graph/direct_sums.py"})),
    Layer("uses", (
        "inference/defaults.py", "inference/blocks.py", "inference/scheduler.py", "inference/kv_cache.py",
        "inference/sampling_kernels.py", "inference/sampler.py",
        "inference/step_kernels.py", "inference/decode_graphs.py",
        "inference/requests.py", "inference/text_stream.py", "inference/engine.py",
        "rl/paths.py", "rl/worker_messages.py", "rl/worker_process.py", "rl/worker_keeper.py", "rl/worker_handle.py",
        "rl/workers.py", "rl/event_loop.py", "rl/builtin_rewards.py", "rl/reward_arguments.py",
        "rl/reward_loading.py", "rl/reward_pickling.py", "rl/reward_calls.py", "rl/reward_workers.py", "rl/rewards.py",
        "rl/rows.py", "rl/data.py", "rl/demonstrations.py",
        "rl/turns.py", "rl/replies.py", "rl/conversations.py", "rl/environment.py", "rl/tool_schema.py",
        "rl/tool_calls.py", "rl/tools.py", "rl/chat_functions.py", "rl/chat.py", "rl/calculator.py", "rl/losses.py",
        "rl/algorithms/",
    ), packages=BASE, independent=True),
    Layer("policy", (
        "policy/limits.py", "policy/host_exchange.py", "policy/weights.py", "policy/adapted_weights.py",
        "policy/phases.py", "policy/phase_memory.py", "policy/cache_layout.py", "policy/packing.py",
        "policy/packed_arrays.py", "policy/asked_rows.py", "policy/rollout_texts.py", "policy/score_graphs.py",
        "policy/step_graphs.py",
        "policy/exactness.py", "policy/agreement_layout.py", "policy/agreement_check.py",
        "policy/train_metrics.py", "policy/turn_session.py", "policy/group_turns.py", "policy/worker.py",
        "policy/layer_division.py",
    ), packages=None),
    Layer("run", (
        "run/checkpoints.py", "run/folder_lock.py", "run/stop.py", "run/built_in_names.py", "run/key_errors.py",
        "run/shared_work.py", "run/hub_ids.py", "run/dataset_splits.py", "run/hub_cache.py", "run/hub_pins.py",
        "run/shapes.py", "run/layer_checks.py", "run/fingerprints.py", "run/config_changes.py", "run/resume.py",
        "run/peer_recovery.py", "run/given.py", "run/demonstrations.py", "run/teacher.py",
        "cluster/ray_package.py", "cluster/reward_pool.py", "run/inputs.py", "run/base_model.py",
        "run/communication.py", "run/layout.py",
        "run/run_shape.py", "run/step_floor.py", "run/plan_lines.py", "run/layer_memory.py", "run/memory_plan.py",
        "run/step_communication.py", "run/step_time.py", "run/memory_choice.py", "run/layout_choice.py",
        "run/memory_remedies.py", "run/scaling.py", "run/plan.py", "run/chosen_memory.py",
        "run/model_source.py", "distributed/refusal.py", "distributed/attempt.py",
        "run/progress.py", "run/memory_meter.py", "run/step_log.py", "run/host_memory.py", "run/tenure.py",
        "run/setup.py",
        "run/failures.py", "run/learning_notes.py", "run/record.py", "run/reward_state.py", "run/reference.py",
        "run/rank_times.py", "run/rollouts.py", "run/sample_details.py", "run/saving.py",
        "run/warm_start.py", "run/begin.py", "run/trained_run.py",
    ), packages=None),
    Layer("people", (
        "train.py",
        "cluster/messages.py", "cluster/lifecycle.py", "cluster/news.py", "cluster/remote_view.py", "cluster/driver.py",
        "cluster/rank_worker.py", "cluster/ray_transport.py", "cluster/launch.py",
        "trainer.py", "compat/",
        "view/growing_lines.py", "view/index_store.py", "view/run_files.py", "view/indexed_file.py",
        "view/metrics_index.py", "view/samples_index.py", "view/run_data.py", "view/catalog.py", "view/series.py",
        "view/metric_names.py", "view/sample_records.py", "view/sample_search.py", "view/machine_files.py",
        "view/machine.py", "view/comparison.py", "view/findings/", "view/diagnosis.py", "view/answers.py",
        "view/export.py", "view/safety.py", "view/events.py", "view/routes.py", "view/server.py",
        "commands/", "cli.py",
    ), packages=None),
)
# fmt: on

# Additions to a layer's `packages`, by part: kernels and chat templates.
EXTRA = {part: frozenset({"triton", "jinja2"}) for part in ("model", "inference", "tokenizer", "sharding")}
# Additions by file that hold inside functions and under TYPE_CHECKING only: importing the file stays instant.
LAZY = {
    "config/yaml_tree.py": frozenset({"yaml"}),
    "config/printing.py": frozenset({"yaml"}),
    "distributed/world.py": frozenset({"torch"}),
    "telemetry/metrics.py": frozenset({"torch"}),
    "telemetry/sinks.py": frozenset({"torch", "pyarrow", "wandb", "mlflow"}),
    "telemetry/run_picture.py": frozenset({"rich"}),
    "telemetry/live_view.py": frozenset({"rich"}),
    "telemetry/notebook_view.py": frozenset({"rich", "IPython"}),
    "telemetry/terminal.py": frozenset({"rich"}),
}


@dataclass(frozen=True, order=True)
class Place:
    """Where a file stands in the table; files import from smaller places."""

    layer: int
    entry: int
    closes: tuple[int, str] = (-1000, "")  # an __init__.py closes its package, after those inside it


@dataclass(frozen=True)
class Import:
    line: int
    module: str
    name: str | None  # of `from module import name`
    lazy: bool


def find_violations(root: Path) -> list[str]:
    """Every breach of the table in the package whose source is `root`, as `file:line: what is wrong`."""
    files = sorted(path.relative_to(root).as_posix() for path in root.rglob("*.py"))
    files = [file for file in files if not file.startswith(STARTERS)]
    known = {*files, *(entry for layer in LAYERS for entry in layer.files)}
    found = []
    for file in files:
        place = find_place(file)
        if place is None:
            found.append(f"{file}: is not in the table of layers")
            continue
        for item in read_imports((root / file).read_text(encoding="utf-8"), file):
            if item.module.split(".")[0] == PACKAGE:
                wrong = check_internal(file, place, item, known)
            else:
                wrong = check_external(file, place, item)
            if wrong:
                found.append(f"{file}:{item.line}: {wrong}")
    return found


def find_place(file: str) -> Place | None:
    folder, _, name = file.rpartition("/")
    inside = f"{folder}/" if folder else ""
    place = None
    for number, layer in enumerate(LAYERS):
        for index, entry in enumerate(layer.files):
            if name in ("__init__.py", "__main__.py") and entry.startswith(inside):
                place = Place(number, index, (-len(inside.split("/")), name))  # the last such entry wins
            elif file == entry or (entry.endswith("/") and file.startswith(entry)):
                return Place(number, index)
    return place


def read_imports(source: str, file: str) -> Iterator[Import]:
    package = [PACKAGE, *file.split("/")[:-1]]

    def visit(node: ast.AST, lazy: bool) -> Iterator[Import]:
        if isinstance(node, ast.Import):
            yield from (Import(node.lineno, alias.name, None, lazy) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: max(0, len(package) - node.level + 1)] if node.level else []
            outside = node.level and not base
            module = "" if outside else ".".join([*base, *([node.module] if node.module else [])])
            yield from (Import(node.lineno, module, alias.name, lazy) for alias in node.names)
        elif isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING"):
            for statement in node.body:
                yield from visit(statement, True)
            for statement in node.orelse:
                yield from visit(statement, lazy)
        else:
            lazy = lazy or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
            for child in ast.iter_child_nodes(node):
                yield from visit(child, lazy)

    yield from visit(ast.parse(source, file), False)


def check_internal(file: str, place: Place, item: Import, known: set[str]) -> str | None:
    target = find_file(item, known)
    there = find_place(target) if target else None
    if target is None or there is None:
        return f"imports {spell(item)}, which is not in the table of layers"
    layer, whole = LAYERS[place.layer], f"imports {target}"
    if file == "__init__.py" and there.layer > 0 and not item.lazy:
        return f"{whole}, and with it all that imports any part of {PACKAGE}"
    if there.layer > place.layer:
        return f"{whole} of the later layer {LAYERS[there.layer].name!r}"
    if there.layer == place.layer:
        if layer.independent and part_of(file) != part_of(target):
            return f"{whole}, but {part_of(file)} and {part_of(target)} do not know each other"
        shares_folder = there == place and layer.files[place.entry].endswith("/")
        if there >= place and not shares_folder:
            return f"{whole}, which does not come before it"
    if layer.of_graph is not None and part_of(target) == "graph" and target not in layer.of_graph:
        return f"{whole}; of graph/ it may import only {', '.join(sorted(layer.of_graph))}"
    return None


def check_external(file: str, place: Place, item: Import) -> str | None:
    name = item.module.split(".")[0]
    if not name:
        return "imports from outside the package"
    # The package's own __init__.py runs before any part of it is imported, so it is as light as the lightest.
    allowed = LAYERS[0 if file == "__init__.py" and not item.lazy else place.layer].packages
    if name in sys.stdlib_module_names or allowed is None:
        return None
    if name in allowed | EXTRA.get(part_of(file), frozenset()):
        return None
    if name in LAZY.get(file, frozenset()):
        return None if item.lazy else f"imports {name} outside a function or TYPE_CHECKING"
    return f"imports {name}, which layer {LAYERS[place.layer].name!r} may not"


def find_file(item: Import, known: set[str]) -> str | None:
    """The file an import is for; in `from package import name`, the name may be a module or not."""
    modules = [item.module] if item.name is None else [f"{item.module}.{item.name}", item.module]
    for module in modules:
        path = "/".join(module.split(".")[1:])
        if f"{path}.py" in known:
            return f"{path}.py"
        if any(file.startswith(f"{path}/" if path else "") for file in known):
            return f"{path}/__init__.py".lstrip("/")
    return None


def part_of(file: str) -> str:
    return file.split("/")[0]


def spell(item: Import) -> str:
    return item.module if item.name is None else f"{item.module}.{item.name}"


def test_the_package_follows_the_table() -> None:
    assert (SOURCE / "__init__.py").is_file()
    assert find_violations(SOURCE) == []


def test_the_table_names_each_file_once() -> None:
    files = [file for layer in LAYERS for file in layer.files]
    assert len(files) == len(set(files))
    assert all(file.endswith((".py", "/")) for file in files)


def test_only_its_two_commands_know_compat() -> None:
    files = {path.relative_to(SOURCE).as_posix() for path in SOURCE.rglob("*.py")}
    importers = set()
    for file in files:
        imports = read_imports((SOURCE / file).read_text(encoding="utf-8"), file)
        targets = [find_file(item, files) for item in imports if item.module.split(".")[0] == PACKAGE]
        if part_of(file) != "compat" and any(target and part_of(target) == "compat" for target in targets):
            importers.add(file)
    assert importers == {"commands/config.py", "commands/doctor.py"}


# The checker itself, on small trees.


def check_tree(root: Path, sources: dict[str, str]) -> list[str]:
    for file, source in sources.items():
        path = root / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(source, encoding="utf-8")
    return find_violations(root)


NEIGHBOURS = {"commands/page.py": "", "rl/algorithms/grpo.py": "", "graph/__init__.py": ""}

ALLOWED = [
    # earlier layers and files, however they are spelled
    ("graph/pool.py", "from rollgraph.config import Config"),
    ("graph/hooks.py", "from rollgraph.graph.errors import GraphError"),
    ("graph/hooks.py", "from .errors import GraphError"),
    ("graph/hooks.py", "from . import errors"),
    ("graph/hooks.py", "from ..config import keys; from ..types import Batch"),
    ("graph/hooks.py", "import rollgraph.graph.errors as e"),
    ("distributed/world.py", "from rollgraph.config import keys; from .. import types"),
    ("rl/algorithms/rloo.py", "from ..losses import clip; from ...types import T"),
    # packages
    ("inference/engine.py", "from rollgraph.graph import capture_it"),
    ("graph/__init__.py", "from .sanitizer import check; from . import errors"),
    ("rl/__init__.py", "from .algorithms import grpo, pick"),
    ("rl/algorithms/rloo.py", "from rollgraph.rl.algorithms.grpo import advantages"),
    ("__main__.py", "from rollgraph.cli import main"),
    ("__init__.py", "def __getattr__(name):\n    import rollgraph.graph"),
    # parts
    ("sharding/collectives.py", "from rollgraph.graph import errors, hooks"),
    ("model/decoder.py", "from rollgraph.graph.hooks import GraphHooks"),
    ("run/checkpoints.py", "from rollgraph.policy.weights import Slots"),
    ("cli.py", "from rollgraph import train; import rollgraph.commands.page"),
    # other packages
    ("files.py", "from __future__ import annotations; import json, os.path"),
    ("distributed/world.py", "def f():\n    import torch.distributed as dist"),
    ("telemetry/metrics.py", "if TYPE_CHECKING:\n    from torch import Tensor"),
    ("graph/tape.py", "import torch.nn, numpy as np; from safetensors.torch import load"),
    ("model/attention.py", "import triton.language as tl"),
    ("tokenizer/tokenizer.py", "import jinja2, tokenizers"),
    ("distributed/attempt.py", "import ray"),
]

FORBIDDEN = [
    # files outside the table
    ("graph/helpers.py", "", "graph/helpers.py: is not in the table"),
    ("utils/__init__.py", "", "utils/__init__.py: is not in the table"),
    ("cli.py", "import rollgraph.utils", "imports rollgraph.utils, which is not in the table"),
    ("cli.py", "from ..neighbour import thing", "imports from outside the package"),
    ("graph/hooks.py", "from ..... import thing", "imports from outside the package"),
    # later layers and files, however they are spelled and wherever they stand
    ("graph/pool.py", "import rollgraph.policy.worker", "policy/worker.py of the later layer 'policy'"),
    ("graph/hooks.py", "from ..model.decoder import D", "model/decoder.py of the later layer 'parts'"),
    ("graph/hooks.py", "\nfrom rollgraph.graph.tape import T", "graph/hooks.py:2: imports graph/tape.py"),
    ("graph/hooks.py", "from .tape import T", "graph/tape.py, which does not come before"),
    ("graph/hooks.py", "from . import errors, tape", "graph/tape.py, which does not come before"),
    ("graph/hooks.py", "def f():\n    from . import tape", ":2: imports graph/tape.py"),
    ("graph/hooks.py", "if TYPE_CHECKING:\n    from .tape import T", ":2: imports graph/tape.py"),
    ("files.py", "class C:\n  async def f(self):\n    from . import types", ":3: imports types.py"),
    ("files.py", "try:\n    from .types import T\nexcept ImportError:\n    pass", ":2: imports types.py"),
    ("files.py", "from rollgraph.telemetry.metrics import M", "telemetry/metrics.py, which does not come before"),
    ("files.py", "import rollgraph.files", "files.py, which does not come before"),
    ("rl/losses.py", "from .algorithms import grpo", "rl/algorithms/grpo.py, which does not come before"),
    ("policy/worker.py", "from ..run import checkpoints", "run/checkpoints.py of the later layer 'run'"),
    # packages
    ("graph/tape.py", "from rollgraph.graph import capture_it", "graph/__init__.py, which does not come"),
    ("graph/tape.py", "from . import capture_it", "graph/__init__.py, which does not come"),
    ("graph/tape.py", "from . import *", "graph/__init__.py, which does not come"),
    ("rl/algorithms/rloo.py", "from . import pick", "rl/algorithms/__init__.py, which does not come"),
    ("rl/algorithms/__init__.py", "from .. import pick", "rl/__init__.py, which does not come"),
    ("graph/tape.py", "from rollgraph import __version__", "__init__.py of the later layer 'people'"),
    ("__init__.py", "from rollgraph.graph import x", "all that imports any part"),
    ("__init__.py", "import torch", "__init__.py:1: imports torch"),
    # parts
    (
        "sharding/collectives.py",
        "from rollgraph.graph.pool import P",
        "only graph/direct_sums.py, graph/errors.py",
    ),
    (
        "model/decoder.py",
        "from rollgraph.graph import GraphHooks",
        "only graph/direct_sums.py, graph/errors.py",
    ),
    ("sharding/collectives.py", "import rollgraph.model.decoder", "sharding and model do not know each other"),
    ("model/decoder.py", "from ..sharding import hook_set", "model and sharding do not know each other"),
    ("tokenizer/files.py", "from ..model import decoder", "tokenizer and model do not know each other"),
    ("model/decoder.py", "from .. import tokenizer", "model and tokenizer do not know each other"),
    ("inference/engine.py", "from rollgraph.rl import data", "inference and rl do not know each other"),
    ("rl/algorithms/grpo.py", "import rollgraph.inference", "rl and inference do not know each other"),
    # other packages
    ("files.py", "import torch", "imports torch, which layer 'values' may not"),
    ("files.py", "def f():\n    import torch", "imports torch, which layer 'values' may not"),
    ("types.py", "if TYPE_CHECKING:\n    import torch", "imports torch, which layer 'values' may not"),
    ("telemetry/metrics.py", "import numpy", "imports numpy, which layer 'values' may not"),
    ("distributed/world.py", "import torch.distributed", "imports torch outside a function"),
    ("distributed/world.py", "class W:\n    from torch import device", "imports torch outside a function"),
    (
        "distributed/world.py",
        "if TYPE_CHECKING:\n    pass\nelse:\n    import torch",
        "imports torch outside a function",
    ),
    ("graph/tape.py", "import transformers.utils", "imports transformers, which layer 'graph' may not"),
    ("graph/tape.py", "import triton", "imports triton, which layer 'graph' may not"),
    ("rl/data.py", "def f():\n    import datasets", "imports datasets, which layer 'uses' may not"),
    ("rl/data.py", "from jinja2 import Template", "imports jinja2, which layer 'uses' may not"),
]


@pytest.mark.parametrize(("file", "source"), ALLOWED)
def test_allows(tmp_path: Path, file: str, source: str) -> None:
    assert check_tree(tmp_path, {**NEIGHBOURS, file: source}) == []


@pytest.mark.parametrize(("file", "source", "message"), FORBIDDEN)
def test_forbids(tmp_path: Path, file: str, source: str, message: str) -> None:
    (violation,) = check_tree(tmp_path, {**NEIGHBOURS, file: source})
    assert message in violation


def test_reports_every_violation_of_every_file(tmp_path: Path) -> None:
    sources = {
        "files.py": "import torch\nimport json\nimport numpy",
        "graph/hooks.py": "from . import errors, tape, pool",
        "graph/errors.py": "import torch",
        "stray.py": "import torch",
    }
    assert [violation.split(" ")[0] for violation in check_tree(tmp_path, sources)] == [
        "files.py:1:",
        "files.py:3:",
        "graph/hooks.py:1:",
        "graph/hooks.py:1:",
        "stray.py:",
    ]
