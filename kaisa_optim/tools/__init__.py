"""Plans before machines are paid for: memory, traffic and time of every strategy."""

from .planner import Plan, plan

__all__ = ["Plan", "plan"]
