"""Mistakes in figures of cost: what was counted twice, forgotten, or taken from the wrong side. [COST]"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np

from attnconform.conformance.adapters.reference_structures import COSTS, ReferenceStructures
from attnconform.conformance.deviations.deviation import deviates
from attnconform.reference.cost.tiles import aligned_tiles


class Miscounts(ReferenceStructures):
    """The reference's figures but for one, whose arguments or result are changed."""

    figure: ClassVar[str]

    def cost(self, name: str, arguments: Mapping[str, Any]) -> float:
        return self.miscount(dict(arguments)) if name == self.figure else super().cost(name, arguments)

    def miscount(self, arguments: dict[str, Any]) -> float:
        """The figure as the mistake gives it."""
        raise NotImplementedError

    def right(self, arguments: Mapping[str, Any]) -> float:
        """The figure as it should be."""
        function: Callable[..., float] = COSTS[self.figure]
        return float(function(**arguments))


@deviates("COST-FLOPS", fault_class="A", report="article 1, 4.1: one of the two products")
class CountsOneProduct(Miscounts):
    """The operations of q·k are counted, those of p·v are not."""

    figure = "attention_flops"

    def miscount(self, arguments: dict[str, Any]) -> float:
        return 2.0 * arguments["num_keys"] * arguments["head_dim_qk"] * arguments.get("num_rows", 1)


@deviates("COST-FLOPS", fault_class="G", report="article 1, 7.1: KV heads where query heads compute")
class CountsKVHeadsForFlops(Miscounts):
    """Operations are counted once per group of four query heads."""

    figure = "attention_flops"

    def miscount(self, arguments: dict[str, Any]) -> float:
        return self.right({**arguments, "num_rows": -(-arguments.get("num_rows", 1) // 4)})


@deviates("COST-INTENSITY", fault_class="A", report="article 1, 4.2 (9): bytes per operation")
class TurnsIntensityAround(Miscounts):
    """Bytes are divided by operations."""

    figure = "arithmetic_intensity"

    def miscount(self, arguments: dict[str, Any]) -> float:
        return float(arguments["num_bytes"] / arguments["flops"])


@deviates("COST-GRID", fault_class="B", report="BR-74 microsoft/SeerAttention#33: a length rounded down to blocks")
class CountsWholeBlocksAlone(Miscounts):
    """The ragged last block of an axis is not counted."""

    figure = "num_blocks"

    def miscount(self, arguments: dict[str, Any]) -> float:
        return float(arguments["length"] // arguments["block_size"])


@deviates("COST-TILES", fault_class="B", report="article 1, 7.1: remote pages cannot be packed into aligned tiles")
class PacksPagesIntoTiles(Miscounts):
    """Any pages share a tile, as if tiles need not be aligned."""

    figure = "aligned_tiles"

    def miscount(self, arguments: dict[str, Any]) -> float:
        return float(-(-len(arguments["pages"]) * arguments["page_size"] // arguments["tile_size"]))


@deviates("COST-TILES", fault_class="T", report="article 1, 1.2: page and tile sizes that do not divide each other")
class CountsOneTilePerPage(Miscounts):
    """A page lies in the tile of its first token alone."""

    figure = "aligned_tiles"

    def miscount(self, arguments: dict[str, Any]) -> float:
        first = np.unique(arguments["pages"] * arguments["page_size"] // arguments["tile_size"])
        return float(aligned_tiles(first, page_size=arguments["tile_size"], tile_size=arguments["tile_size"]))


@deviates("COST-UTILIZATION", fault_class="A", report="article 1, 7.3 (18): tokens per block, not per token of a block")
class DividesByBlocksAlone(Miscounts):
    """Tokens are divided by the touched blocks without the block size."""

    figure = "block_use"

    def miscount(self, arguments: dict[str, Any]) -> float:
        return float(arguments["num_tokens"] / arguments["num_blocks"])


@deviates("COST-INDEX-USE", fault_class="K", report="article 1, 7.4 (20): the mean over rows that are not empty")
class LeavesOutEmptyRows(Miscounts):
    """Rows without entries do not count as rows of the table."""

    figure = "index_use"

    def miscount(self, arguments: dict[str, Any]) -> float:
        lengths = arguments["lengths"]
        return self.right({**arguments, "lengths": lengths[lengths > 0]})


@deviates("COST-AMPLIFICATION", fault_class="A", report="article 2, 6.3: utilization reported as amplification")
class TurnsAmplificationAround(Miscounts):
    """Edges are divided by computed elements."""

    figure = "execution_amplification"

    def miscount(self, arguments: dict[str, Any]) -> float:
        return float(arguments["num_edges"] / arguments["executed"])


@deviates("COST-BYTES", fault_class="G", report="article 1, 7.1: a copy for each query head")
class ReadsKVOncePerQueryHead(Miscounts):
    """Keys and values are counted four times over, once per query head of a group."""

    figure = "kv_bytes"

    def miscount(self, arguments: dict[str, Any]) -> float:
        return 4 * self.right(arguments)


@deviates("COST-BYTES", fault_class="Q", report="article 1, 7.2: K and V may be stored differently")
class TakesVForAsWideAsK(Miscounts):
    """Values are counted with the dimension and the element size of keys."""

    figure = "kv_bytes"

    def miscount(self, arguments: dict[str, Any]) -> float:
        k_bytes = arguments.get("k_bytes", 2)
        return self.right({**arguments, "head_dim_vo": arguments["head_dim_qk"], "v_bytes": k_bytes})


@deviates("COST-INDEX-BYTES", fault_class="A", report="article 1, 7.1: entries counted as bytes")
class CountsEntriesForBytes(Miscounts):
    """The size of an index table is given in entries."""

    figure = "index_table_bytes"

    def miscount(self, arguments: dict[str, Any]) -> float:
        return float(arguments["num_entries"] * arguments.get("num_lists", 1))


@deviates("COST-INDEX-BYTES", fault_class="A", report="article 2, 6.3: counts beside the list")
class ForgetsTheRowCounts(Miscounts):
    """A block list takes its indices and nothing for its counts."""

    figure = "block_mask_bytes"

    def miscount(self, arguments: dict[str, Any]) -> float:
        return self.right({**arguments, "num_rows": 0})


@deviates("COST-TRANSACTION", fault_class="A", report="article 1, 2.2: wanted bytes taken for moved bytes")
class MovesWhatIsWanted(Miscounts):
    """Every transaction is taken to carry wanted bytes alone."""

    figure = "transaction_utilization"

    def miscount(self, arguments: dict[str, Any]) -> float:
        return 1.0


@deviates("COST-TIME", fault_class="A", report="article 1, 4.2: peak instead of what scattered reads reach")
class MovesAtPeakBandwidth(Miscounts):
    """The share that scattered access leaves of the bandwidth is ignored."""

    figure = "memory_time"

    def miscount(self, arguments: dict[str, Any]) -> float:
        return self.right({**arguments, "share": 1.0})


@deviates("COST-TIME", fault_class="A", report="article 1, 4.2: computing and moving at the same time")
class AddsComputingToMoving(Miscounts):
    """The roofline is the sum of both times instead of the longer one."""

    figure = "roofline_time"

    def miscount(self, arguments: dict[str, Any]) -> float:
        return float(arguments["flops"] / arguments["peak_flops"] + arguments["num_bytes"] / arguments["bandwidth"])


@deviates("COST-SCALES", fault_class="Q", report="article 1, 7.2: scale bytes left out of the traffic")
class CountsAChannelOncePerPage(Miscounts):
    """A scale per page and channel is counted as a scale per page."""

    figure = "scale_bytes"

    def miscount(self, arguments: dict[str, Any]) -> float:
        coarse = {"page_channel": "page"}
        given = {k: coarse.get(v, v) if isinstance(v, str) else v for k, v in arguments.items()}
        return self.right(given)


@deviates("COST-SCALES", fault_class="Q", report="article 1, 7.2: one head's scales for all")
class CountsScalesOfOneHead(Miscounts):
    """Scales are counted as if there were one KV head."""

    figure = "num_scales"

    def miscount(self, arguments: dict[str, Any]) -> float:
        return self.right({**arguments, "num_kv_heads": 1})


@deviates("COST-GATHER", fault_class="A", report="article 1, 2.1 (3): the copy is written and read again")
class ForgetsThatACopyIsRead(Miscounts):
    """A copy adds its writing to the traffic, and not its reading."""

    figure = "gather_traffic"

    def miscount(self, arguments: dict[str, Any]) -> float:
        return self.right(arguments) / 2


@deviates("COST-GATHER", fault_class="A", report="article 1, 2.2: the first reading may be as scattered as any")
class ReadsTheSourceInOrder(Miscounts):
    """The first reading of a gather is priced at the bandwidth of the copy."""

    figure = "gather_time"

    def miscount(self, arguments: dict[str, Any]) -> float:
        in_order = replace(arguments["bandwidths"], gather=arguments["bandwidths"].contiguous)
        return self.right({**arguments, "bandwidths": in_order})


@deviates("COST-PARTIALS", fault_class="C", report="article 1, 7.1: m and l beside the output")
class ForgetsTheSumsOfSplits(Miscounts):
    """Partial states are counted without m and l."""

    figure = "partial_state_bytes"

    def miscount(self, arguments: dict[str, Any]) -> float:
        return self.right({**arguments, "with_sums": False})


@deviates("COST-ATOMICS", fault_class="A", report="article 1, 7.1: an addition per token, not per element")
class CountsAnAdditionPerToken(Miscounts):
    """A hot page takes one addition per token and query tile."""

    figure = "hot_atomics"

    def miscount(self, arguments: dict[str, Any]) -> float:
        return self.right({**arguments, "head_dim": 1})


@deviates("COST-GRADIENTS", fault_class="C", report="article 1, 7.1 (15): two gradients, dK and dV")
class KeepsOneGradient(Miscounts):
    """The partial gradients of keys are counted, those of values are not."""

    figure = "gradient_partial_bytes"

    def miscount(self, arguments: dict[str, Any]) -> float:
        return self.right(arguments) / 2


@deviates("COST-END-TO-END", fault_class="A", report="article 1, 4.2 (10): the kernel's speedup as the step's")
class ComparesKernelsAlone(Miscounts):
    """A speedup counts attention, and nothing that the sparse path adds."""

    figure = "end_to_end_speedup"

    def miscount(self, arguments: dict[str, Any]) -> float:
        return float(arguments["dense"] / arguments["times"].attention)


@deviates("COST-USE-BOUND", fault_class="A", report="article 1, 7.3: k scattered tokens touch up to k blocks")
class TakesTokensForClustered(Miscounts):
    """The lower bound of the use of blocks is that of clustered tokens."""

    figure = "least_block_use"

    def miscount(self, arguments: dict[str, Any]) -> float:
        return float(COSTS["largest_block_use"](**arguments))


@deviates("COST-USE-BOUND", fault_class="A", report="no report: more blocks than the request has")
class ScattersPastTheRequest(Miscounts):
    """Scattered tokens are given a block each, however few blocks the request has."""

    figure = "least_block_use"

    def miscount(self, arguments: dict[str, Any]) -> float:
        return 1 / float(arguments["block_size"])


@deviates("MASK-LEAK", fault_class="Z", report="article 2, 6.3: masked keys stand in the denominator too")
class LeavesTheLeakOutOfTheDenominator(Miscounts):
    """What leaks is divided by the denominator of the keys that count alone."""

    figure = "leaked_mass"

    def miscount(self, arguments: dict[str, Any]) -> float:
        leaked = float(arguments["num_masked"] * np.exp(-arguments["c"]))
        return leaked / arguments["z"] if arguments["z"] else 0.0
