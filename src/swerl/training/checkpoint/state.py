"""What of a rank's model and optimizer goes into a checkpoint, and back.

For every parameter that is trained: its fp32 master weight and Adam's two moments, under the
parameter's name in the whole model. The weights in training are the masters, rounded to the
training type, so they need not be written.
"""

# heavy imports: this file only runs in the trainer's own processes

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel import get_cuda_rng_tracker

from swerl.training.checkpoint.pieces import Piece, belongs_to_experts, cuts, is_first_copy, pieces
from swerl.training.rank.gather import global_name
from swerl.training.rank.learner import Learner

OPTIMIZER = "optimizer."
"""What names of the optimizer's tensors begin with."""
MOMENTS = ("exp_avg", "exp_avg_sq")
"""Adam's running means of the gradient and of its square."""
_OUTPUT, _TIED = "output_layer.weight", "embedding.word_embeddings.weight"


def owned(learner: Learner) -> list[Piece]:
    """Return the pieces that this rank writes: together the ranks hold each element once."""
    found: list[Piece] = []
    names = _names(learner)
    trained = set()
    for optimizer in _optimizers(learner):
        for param, start, tensors in _shards(optimizer):
            trained.add(param)
            if is_first_copy(param) and not _is_tied_copy(learner, param):
                found += _pieces(names, param, tensors, start)
    for param, key in names.items():
        if param not in trained and not _is_trained(param) and _is_first_replica(param):
            found += pieces(key, param, param.shape, cuts(param))
    return found


def load_pieces(learner: Learner) -> list[Piece]:
    """Return all pieces that this rank needs: its parameters, and its range of the moments."""
    found: list[Piece] = []
    names = _names(learner)
    for param, key in names.items():
        found += pieces(key, param, param.shape, cuts(param))
    for optimizer in _optimizers(learner):
        for param, start, tensors in _shards(optimizer):
            found += _pieces(names, param, tensors, start)
    return found


def common(learner: Learner) -> dict[str, Any]:
    """Return what is not a piece of a tensor and the same on all ranks."""
    return {"scheduler": dict(learner.scheduler.state_dict()), "adam_steps": _adam_steps(learner)}


def load_common(learner: Learner, state: Mapping[str, Any]) -> None:
    """Take back what `common` returned."""
    learner.scheduler.num_steps = 0  # loading adds to it
    learner.scheduler.load_state_dict(dict(state["scheduler"]))
    for optimizer in _optimizers(learner):
        _set_steps(optimizer.optimizer, state["adam_steps"])


def dtypes(learner: Learner) -> dict[str, str]:
    """Return the type that each parameter of this rank has in training, by torch's name."""
    names = _names(learner).items()
    return {key: str(param.dtype).removeprefix("torch.") for param, key in names}


def random_state() -> dict[str, Any]:
    """Return this rank's random state."""
    on_gpu = torch.cuda.is_available()
    return {
        "python": random.getstate(),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if on_gpu else None,
        "megatron": get_cuda_rng_tracker().get_states(),
    }


def load_random_state(states: Sequence[Mapping[str, Any]], rank: int) -> None:
    """Continue from a rank's random state; from the first one's where there were fewer ranks."""
    state = states[rank] if rank < len(states) else states[0]
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words), gauss))
    torch.set_rng_state(state["torch"])
    if state["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
    get_cuda_rng_tracker().set_states(dict(state["megatron"]))


def _names(learner: Learner) -> dict[torch.nn.Parameter, str]:
    """Return the name of each parameter in the whole model.

    A last pipeline stage has a copy of tied embeddings, which goes by the name of the original.
    """
    model = learner.model
    is_tied = model.share_embeddings_and_output_weights
    names = {param: global_name(model, name) for name, param in model.named_parameters()}
    return {param: _TIED if is_tied and name == _OUTPUT else name for param, name in names.items()}


def _is_tied_copy(learner: Learner, param: torch.nn.Parameter) -> bool:
    model = learner.model
    return bool(
        model.share_embeddings_and_output_weights
        and not model.pre_process
        and param is model.shared_embedding_or_output_weight()
    )


def _optimizers(learner: Learner) -> list[Any]:
    """Return the distributed optimizers: one for dense parameters, one for experts."""
    chained: Any = learner.optimizer
    return list(getattr(chained, "chained_optimizers", [chained]))


def _shards(
    optimizer: Any,
) -> Iterator[tuple[torch.nn.Parameter, int, dict[str, torch.Tensor]]]:
    """Yield each parameter that this rank's optimizer has a range of: its start, its state."""
    for buffer in optimizer.gbuf_ranges:
        for buckets in buffer.values():
            for bucket in buckets:
                for param, ranges in bucket["param_map"].items():
                    master = _master(optimizer, param)
                    state = optimizer.optimizer.state[master]
                    if not state:
                        state.update(_fresh_adam_state(master))
                    yield param, ranges["param"].start, {"param": master, **state}


def _master(optimizer: Any, param: torch.nn.Parameter) -> torch.Tensor:
    """Return this rank's range of a parameter in the form that Adam updates."""
    group, order = optimizer.model_param_group_index_map[param]
    main: torch.Tensor = optimizer.optimizer.param_groups[group]["params"][order]
    return main


def _fresh_adam_state(param: torch.Tensor) -> dict[str, torch.Tensor]:
    return {
        "step": torch.tensor(0.0),
        "exp_avg": torch.zeros_like(param),
        "exp_avg_sq": torch.zeros_like(param),
    }


def _pieces(
    names: Mapping[torch.nn.Parameter, str],
    param: torch.nn.Parameter,
    tensors: Mapping[str, torch.Tensor],
    start: int,
) -> Iterator[Piece]:
    key = names[param]
    yield from pieces(key, tensors["param"], param.shape, cuts(param), start=start)
    for moment in MOMENTS:
        name = f"{OPTIMIZER}{moment}.{key}"
        yield from pieces(name, tensors[moment], param.shape, cuts(param), start=start)


def _adam_steps(learner: Learner) -> int:
    """Return the steps that Adam counts for its bias correction, the same for all parameters."""
    adams = [optimizer.optimizer for optimizer in _optimizers(learner)]
    counts = [state["step"] for adam in adams for state in adam.state.values() if "step" in state]
    counts += [group["step"] for adam in adams for group in adam.param_groups if "step" in group]
    return int(max(counts, default=0))


def _set_steps(adam: Any, steps: int) -> None:
    for group in adam.param_groups:
        if "step" in group:  # where fused Adams count
            group["step"] = steps
    for state in adam.state.values():
        if "step" in state:
            # One tensor each: torch's Adam counts in place.
            state["step"] = torch.tensor(float(steps))


def _is_trained(param: torch.nn.Parameter) -> bool:
    """Return whether some rank's optimizer has the parameter; this one may have no range of it."""
    return param.requires_grad


def _is_first_replica(param: torch.nn.Parameter) -> bool:
    if not is_first_copy(param):
        return False
    if belongs_to_experts(param):
        return bool(parallel_state.get_expert_data_parallel_rank() == 0)
    return bool(parallel_state.get_data_parallel_rank(with_context_parallel=True) == 0)
