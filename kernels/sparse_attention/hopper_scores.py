"""What the kernels of Hopper make of products: scores by a rule, and weights against the maximum so far.

Scores of keys that a row may not see are masked before the maximum. [MASK-BEFORE-MAX]
"""

from triton.experimental.gluon import jit
from triton.experimental.gluon import language as gl

LOG2_E = gl.constexpr(1.4426950408889634)
PLAIN = gl.constexpr(0)
ALIBI = gl.constexpr(1)
SOFT_CAP = gl.constexpr(2)
# 2^30 + 1 is 2^30 to a tanh: nothing larger changes a capped score, and two of them multiply without overflow
LARGEST_POWER = gl.constexpr(30.0)
LARGEST_SLOPE_POWER = gl.constexpr(62.0)  # a slope goes on to fall where tanh is 1; 2^62 squared is below 2^128
LEAST_FACTOR = gl.constexpr(2.0**-126)


@jit
def weigh(
    s, row_max, row_sum, first, run, bounds,
    TILE_KV: gl.constexpr,
    SCORE: gl.constexpr,
    HAS_LISTS: gl.constexpr,
):  # fmt: skip
    """Weights of a tile against the new maximum, what rescales what came before, the maximum and the sum."""
    weights, rescale, new_max, lane_sums = find_weights(s, row_max, first, run, bounds, TILE_KV, SCORE, HAS_LISTS)
    tile_sum = gl.convert_layout(gl.sum(lane_sums, axis=1), row_max.type.layout)
    return weights, rescale, new_max, row_sum * rescale + tile_sum


@jit
def weigh_lanes(
    s, row_max, row_sum, first, run, bounds,
    TILE_KV: gl.constexpr,
    SCORE: gl.constexpr,
    HAS_LISTS: gl.constexpr,
):  # fmt: skip
    """As `weigh`, with a sum of every lane of eight keys, [ROWS, 8]: no tile has to add them up across threads."""
    weights, rescale, new_max, lane_sums = find_weights(s, row_max, first, run, bounds, TILE_KV, SCORE, HAS_LISTS)
    of_rows: gl.constexpr = gl.SliceLayout(1, lane_sums.type.layout)
    return weights, rescale, new_max, row_sum * gl.convert_layout(rescale, of_rows)[:, None] + lane_sums


@jit
def find_weights(
    s, row_max, first, run, bounds,
    TILE_KV: gl.constexpr,
    SCORE: gl.constexpr,
    HAS_LISTS: gl.constexpr,
):  # fmt: skip
    """Weights of a tile against the new maximum, what rescales what came before, the maximum, the tile's lane sums.

    Keys are taken as eights of neighbours, [ROWS, TILE_KV / 8, 8]: a thread holds two keys of every eight, and reduces
    over the eights first, in two chains a row that do not wait for each other. Keys that every row admits need no mask.
    [MASK-BEFORE-MAX]
    """
    _kv_start, _kv_end, full_start, full_end, _list_positions_ptr = run
    _mask_start, _mask_end, _q_idx, _slope, _product_slope, score_scale, cap_factor, cap = bounds
    x = s.reshape([s.shape[0], TILE_KV // 8, 8])
    layout: gl.constexpr = x.type.layout
    of_lanes: gl.constexpr = gl.SliceLayout(1, layout)  # [ROWS, 8]
    of_rows: gl.constexpr = gl.SliceLayout(1, of_lanes)
    eight = gl.arange(0, TILE_KV // 8, layout=gl.SliceLayout(0, gl.SliceLayout(2, layout))) * 8
    lane = gl.arange(0, 8, layout=gl.SliceLayout(0, of_lanes))
    is_masked = (first < full_start) | (first + TILE_KV > full_end)
    if SCORE == ALIBI:
        rest = rest_of_bias(first, bounds, TILE_KV, layout)
    if is_masked:
        x = mask_scores(x, first, eight, lane, run, bounds, HAS_LISTS)
    tile_max = gl.max(x, axis=1)
    if SCORE == ALIBI:
        tile_max = tile_max * score_scale + rest
    tile_max = gl.convert_layout(gl.max(tile_max, axis=1), row_max.type.layout)
    if SCORE == PLAIN:
        tile_max = tile_max * score_scale
    if SCORE == SOFT_CAP:
        # A cap keeps the order, so that the maximum goes through it alone; a masked score would come out as -cap.
        capped_max = cap - 2 * cap * reciprocal(1.0 + gl.exp2(tile_max * cap_factor))
        tile_max = gl.where(tile_max == float("-inf"), tile_max, capped_max)
    new_max = gl.maximum(row_max, tile_max)
    # A row that has admitted nothing yet would subtract -inf from -inf. [EMPTY-OUT]
    base = gl.where(new_max == float("-inf"), 0.0, new_max)
    if SCORE == PLAIN:
        x = x * score_scale - spread(base, layout)
    elif SCORE == ALIBI:
        x = x * score_scale - (gl.convert_layout(base, of_rows)[:, None] - rest).expand_dims(1)
    else:
        x = shares_of_cap(x, cap_factor) * (-2 * cap) + spread(cap - base, layout)
        if is_masked:
            x = mask_scores(x, first, eight, lane, run, bounds, HAS_LISTS)
    weights = gl.exp2(x)
    rescale = gl.exp2(row_max - base)
    lane_sums = gl.sum(weights, axis=1)
    weights = gl.convert_layout(weights.reshape(s.shape), s.type.layout)
    return weights, rescale, new_max, lane_sums


@jit
def start_scores(zero, first, bounds, TILE_KV: gl.constexpr, SCORE: gl.constexpr):
    """What the product of q and k is added to: of a bias, where its eights of keys begin, before sm_scale.

    slope (kv - q) in two parts, that of the eight, from the tile's key nearest to the row so that little is lost in
    float32, and that of row and lane alone, which `rest_of_bias` has.
    """
    if SCORE == ALIBI:
        x = zero.reshape([zero.shape[0], TILE_KV // 8, 8])
        layout: gl.constexpr = x.type.layout
        eight = gl.arange(0, TILE_KV // 8, layout=gl.SliceLayout(0, gl.SliceLayout(2, layout))) * 8
        way, _far = find_ways(first, bounds[2], TILE_KV, layout)
        slope = gl.convert_layout(bounds[4], gl.SliceLayout(1, way.type.layout))[:, None]
        begin = (slope * way).expand_dims(1)
        x = gl.fma(slope.expand_dims(1) + x, eight.to(gl.float32)[None, :, None] + x, begin + x)
        return gl.convert_layout(x.reshape(zero.shape), zero.type.layout)
    else:
        return zero


@jit
def rest_of_bias(first, bounds, TILE_KV: gl.constexpr, layout: gl.constexpr):
    """What scores that began with `start_scores` still lack of their bias, [ROWS, 8], in base 2."""
    way, far = find_ways(first, bounds[2], TILE_KV, layout)
    of_rows: gl.constexpr = gl.SliceLayout(1, way.type.layout)
    slope = gl.convert_layout(bounds[4], of_rows)[:, None]
    # what rounding moved the begin of the eights by, exactly
    moved = gl.fma(slope + 0.0 * way, way, -(slope * way))
    return (gl.convert_layout(bounds[3], of_rows) * far)[:, None] + moved * bounds[5]


@jit
def find_ways(first, q_idx, TILE_KV: gl.constexpr, layout: gl.constexpr):
    """From the tile's key nearest to the row to the first eight, for every lane, [ROWS, 8]; to the row, [ROWS]."""
    of_lanes: gl.constexpr = gl.SliceLayout(1, layout)
    of_rows: gl.constexpr = gl.SliceLayout(1, of_lanes)
    near = gl.convert_layout(gl.minimum(gl.maximum(q_idx - first, 0), TILE_KV), of_rows)
    lane = gl.arange(0, 8, layout=gl.SliceLayout(0, of_lanes))
    far = gl.convert_layout(first - q_idx, of_rows) + near
    return (lane[None, :] - near[:, None]).to(gl.float32), far.to(gl.float32)


@jit
def spread(row, layout: gl.constexpr):
    """A number a row, [ROWS, 1, 1]."""
    return gl.convert_layout(row, gl.SliceLayout(1, gl.SliceLayout(2, layout)))[:, None, None]


@jit
def find_positions(first, run, TILE_KV: gl.constexpr, HAS_LISTS: gl.constexpr, layout: gl.constexpr):
    """Logical positions of a tile's keys, [TILE_KV]; of entries that are not the task's, -1."""
    return load_positions(first + gl.arange(0, TILE_KV, layout=layout), run, HAS_LISTS)


@jit
def load_positions(key, run, HAS_LISTS: gl.constexpr):
    """Logical positions of keys; of entries that are not the task's, -1."""
    if HAS_LISTS:
        return gl.load(run[4] + key, mask=(key >= run[0]) & (key < run[1]), other=-1)
    else:
        return key


@jit
def mask_scores(x, first, eight, lane, run, bounds, HAS_LISTS: gl.constexpr):
    """The scores of what a row may see, -inf for all other keys of the tile."""
    layout: gl.constexpr = x.type.layout
    kv_idx = load_positions(first + eight[None, :, None] + lane[None, None, :], run, HAS_LISTS)
    is_admitted = (kv_idx >= spread(bounds[0], layout)) & (kv_idx < spread(bounds[1], layout))
    return gl.where(is_admitted, x, float("-inf"))


@jit
def shares_of_cap(x, cap_factor):
    """(1 - tanh) / 2 of products by what makes 2 log2(e) times tanh's argument of them."""
    return reciprocal_of_pairs(1.0 + gl.exp2(gl.minimum(x * cap_factor, LARGEST_POWER)))


@jit
def missing_of_cap(x, cap_factor):
    """1 - tanh of the same, from which a slope can be told: as small as it comes."""
    return reciprocal_of_pairs(0.5 + 0.5 * gl.exp2(gl.minimum(x * cap_factor, LARGEST_SLOPE_POWER)))


@jit
def slope_of_cap(missing):
    """1 - tanh^2 by 1 - tanh, without its exponential, whose registers are wanted. [GRAD-SOFTCAP]

    Relatively right where tanh is from 0 to 1. Where it nears -1 the difference cancels: what is left errs by less than
    20 U, of the 23 U and more that the declared accuracy of tanh allows there.
    """
    return missing * (2.0 - missing)


@jit
def reciprocal(x):
    """1 / x to a unit in its last place, of x from 1 on."""
    return gl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1)


@jit
def reciprocal_of_pairs(x):
    """1 / x, one reciprocal for two neighbours, whose product must not overflow: half the work of a scarce unit."""
    return gl.inline_asm_elementwise(
        "{ .reg .f32 t; mul.ftz.f32 t, $2, $3; rcp.approx.ftz.f32 t, t; "
        "mul.ftz.f32 $0, t, $3; mul.ftz.f32 $1, t, $2; }",
        "=&f,=&f,f,f", [x], dtype=gl.float32, is_pure=True, pack=2,
    )  # fmt: skip
