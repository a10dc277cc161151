"""The ways to run a window of microbatches side by side, compiled for the machine that it will run on."""

from gradcombine.verify.plan.planning import Figures, Plan, Row, plan, plan_named

__all__ = ["Figures", "Plan", "Row", "plan", "plan_named"]
