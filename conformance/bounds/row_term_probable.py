"""Probable error of D = dO.out, which all keys of a row share. [BOUND-GRAD] [BOUND-PROBABILISTIC]"""

# numpy types a matrix product as Any.
# mypy: disable-error-code="no-any-return"

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from attnconform.conformance.bounds.backward_worst import WorstBackward
from attnconform.conformance.bounds.block import Array
from attnconform.conformance.bounds.correlation import Cells, bound_partial_sums, relative_cells
from attnconform.conformance.bounds.forward_probable import ProbableForward
from attnconform.conformance.bounds.gradients import Gradients
from attnconform.conformance.bounds.numerics import Numerics
from attnconform.conformance.bounds.rounding import accumulation_drift, largest, sum_row
from attnconform.conformance.bounds.softmax import Softmax


@dataclass(frozen=True)
class ProbableTerm:
    """A probable error within one block's backward, and what it is made from."""

    forward: ProbableForward
    worst: WorstBackward

    @property
    def softmax(self) -> Softmax:
        return self.forward.softmax

    @property
    def numerics(self) -> Numerics:
        return self.forward.numerics

    @property
    def grads(self) -> Gradients:
        return self.worst.grads


@dataclass(frozen=True)
class ProbableRowTerm(ProbableTerm):
    """Terms of D: (rows, keys) or (rows, 1)."""

    @cached_property
    def variance(self) -> Array:
        """V_D: rounding of out, its parts and P, logits, sums, denominator; storage of dP where D is summed from it."""
        x, c, g, f = self.softmax, self.numerics, self.grads, self.forward
        rounding = self.worst.out_rounding
        out_cells = Cells.from_keys(np.floor(x.out / (rounding / 2)))
        stored = f.weight_rounding * (np.abs(g.dp) + c.l_from_p * np.abs(g.row_dot))
        variance = (
            sum_row(out_cells.sum_coherent(np.abs(g.do) * (rounding + f.part_rounding))) / 3
            + sum_row(f.weight_cells.sum_coherent(stored)) / 3
            + sum_row(f.logit_cells.sum_coherent(x.weights * f.noise * g.out_share))
            + self.moved_by_runs(f.maximum_noise, np.sqrt(f.num_maxima)) ** 2
            + self.moved_by_runs(f.rescale_noise) ** 2
            + f.sum_variance * sum_row(g.do**2 * f.partial_out**2)
            + g.row_dot**2 * c.u**2 * f.chain_variance / 3
            + g.do.shape[1] / 3 * c.u**2 * sum_row(np.abs(g.do * x.out)) ** 2
        )
        if c.u_dp:
            dp_cells = relative_cells(g.dp, c.u_dp / 2)
            variance = variance + c.u_dp**2 / 3 * sum_row(dp_cells.sum_coherent(x.weights * np.abs(g.dp)))
        return variance

    @cached_property
    def deviation(self) -> Array:
        """s_D."""
        return np.sqrt(self.variance) * self.forward.is_valid

    @cached_property
    def drift(self) -> Array:
        """S_D, never above the worst case."""
        x, c, g, f = self.softmax, self.numerics, self.grads, self.forward
        changes = [sum_row(x.value_weights * (g.do @ change.T)) for change in f.operands.v]
        drift = (
            sum_row(x.weights * f.own_drift * f.growth * g.out_share)
            + self.moved_by_runs(f.run_drift, c.num_splits)
            + self.constant_moved
            + sum_row(f.flushed * np.abs(g.dp))
            + largest(changes)
            + sum_row(x.value_weights * (np.abs(g.do) @ f.operands.v_error.T))
            + sum_row(g.do_error * np.abs(x.out))
            + accumulation_drift(c, x.num_keys, len(x.k)) * sum_row(np.abs(g.do) * f.partial_out)
            + np.abs(g.row_dot) * f.row_drift
            + np.abs(g.row_term) * (c.u_d + c.u * (g.dlse != 0))
        )
        return np.where(f.is_valid, np.minimum(drift, self.worst.row_error), self.worst.row_error)

    @cached_property
    def out_moved(self) -> Array:
        """P (dP - D): what a relative error of each weight does to D; sums to 0 over a row."""
        return self.softmax.weights * (self.grads.dp - self.grads.row_dot)

    @cached_property
    def partial_moved(self) -> Array:
        """Any contiguous partial sum of it."""
        moved = self.out_moved
        prefixes = np.cumsum(moved, axis=1).T[..., None]
        return bound_partial_sums(prefixes, sum_row(moved**2), sum_row(np.abs(moved)))

    def moved_by_runs(self, along_runs: Array, runs: Array | int = 1) -> Array:
        """What relative errors alike along runs of keys do to D."""
        error = along_runs * self.forward.growth
        by_runs = runs * error.max(1, keepdims=True) * self.partial_moved
        return np.minimum(sum_row(np.abs(self.out_moved) * error), by_runs)

    @cached_property
    def constant_moved(self) -> Array:
        """What rounded constants do to D: they meet the signed sum of P |s - m| (dP - D)."""
        return np.abs(sum_row(self.out_moved * self.forward.constant_drift * self.forward.growth))
