"""From "it is 3 ulp off" to "it is the ring over 4 ranks": which order and precision made a result."""

from gradcombine.verify.origin.explain import Explanation, Verdict, explain

__all__ = ["Explanation", "Verdict", "explain"]
