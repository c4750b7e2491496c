"""The sums behind an estimate. Dollars are US dollars; nothing here knows a price."""

from __future__ import annotations


def sandbox_dollars_per_second(
    *, vcpus: float, memory_gib: float, vcpu_second: float, gib_second: float
) -> float:
    """Return what one running sandbox costs a second; prices in dollars per unit and second."""
    return vcpus * vcpu_second + memory_gib * gib_second


def episode_dollars(dollars_per_second: float, sandbox_seconds: float) -> float:
    """Return what the sandboxes of one Episode cost.

    `sandbox_seconds` are those of all its sandboxes together: the agent's and the grading one.
    """
    return dollars_per_second * sandbox_seconds


def sandbox_dollars(dollars_per_episode: float, num_episodes: float, *, factor: float) -> float:
    """Return what a run's sandboxes cost; `factor` covers leaks and idle ones."""
    return dollars_per_episode * num_episodes * factor


def wall_hours(num_steps: float, step_minutes: float) -> float:
    """Return the hours of a run."""
    return num_steps * step_minutes / 60


def gpu_hours(num_gpus: float, hours: float) -> float:
    """Return the GPU-hours of a run that holds its GPUs from start to end."""
    return num_gpus * hours
