"""FlashInfer 0.6.13 as far as the adapters call it: the same signatures and demands, the arithmetic in plain torch."""

import math

import torch


def demand(holds, what):
    """What the package would refuse, or read wrongly without a word."""
    if not holds:
        raise AssertionError(what)


def attend(q, k, v, mask, sm_scale, cap):
    """out and base-2 lse of (rows, heads, dim) over (keys, kv_heads, dim); mask (rows, keys) or None."""
    group = q.shape[1] // k.shape[1]
    q, k, v = (x.float().transpose(0, 1) for x in (q, k, v))
    scores = q @ k.repeat_interleave(group, 0).transpose(1, 2) * sm_scale
    if cap:
        scores = cap * torch.tanh(scores / cap)
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf)
    lse = scores.logsumexp(2)
    p = (scores - lse[..., None]).exp().nan_to_num(0.0)
    v = v.repeat_interleave(group, 0)
    # bytes of keys that are not attended are never multiplied
    out = p @ torch.where((p == 0).all(1)[..., None], 0.0, v)
    return out.transpose(0, 1), (lse / math.log(2)).transpose(0, 1)


def check_paged(q, k_cache, v_cache, out, lse, head_dim):
    """The C++ side takes strides of K for V, writes dense outputs, and reads head_dim numbers without a gap."""
    demand(k_cache.stride() == v_cache.stride(), "k and v differ in strides")
    demand(k_cache.stride(-1) == 1 and q.stride(-1) == 1, "head_dim has gaps")
    demand(out.is_contiguous() and lse.is_contiguous(), "outputs have gaps")
    demand(out.shape == q.shape and lse.shape == q.shape[:2], "outputs have other shapes")
    demand(lse.dtype == torch.float32 and out.dtype == q.dtype, "outputs have other dtypes")
    demand(q.shape[-1] == k_cache.shape[-1] == head_dim, "head_dim is not the planned one")


def tokens_of(cache, layout, pages, last_page_len):
    """(keys, kv_heads, dim) of a list of pages."""
    cache = cache if layout == "NHD" else cache.transpose(1, 2)
    gathered = [cache[page] for page in pages.tolist()]
    if not gathered:
        return cache[:0].flatten(0, 1)
    return torch.cat([*gathered[:-1], gathered[-1][:last_page_len]])


def check_lists(indptr, pages, last_page_len, page_size):
    """Metadata are int32, and a list's length is (pages - 1) * page_size + last_page_len: of an empty one 0."""
    demand({x.dtype for x in (indptr, pages, last_page_len)} == {torch.int32}, "index arrays are not int32")
    demand(len(indptr) == len(last_page_len) + 1 and int(indptr[-1]) == len(pages), "indptr does not fit")
    demand(((last_page_len > 0) & (last_page_len <= page_size)).all(), "last_page_len is no part of a page")
    demand((lengths_of(indptr, last_page_len, page_size) >= 0).all(), "an empty list has no length of 0")


def lengths_of(indptr, last_page_len, page_size):
    """Tokens of each list, as the package documents and as it counts a mask's bits."""
    return (indptr[1:] - indptr[:-1] - 1) * page_size + last_page_len


class Paged:
    """Buffers of a wrapper for a graph: planned into, never replaced, never outgrown."""

    def keep(self, **arrays):
        for name, array in arrays.items():
            buffer = self.buffers.get(name)
            if self.use_cuda_graph:
                demand(torch.is_tensor(buffer) and len(array) <= len(buffer), f"{name} outgrows its buffer")
                buffer[: len(array)].copy_(array)
            setattr(self, name, buffer if self.use_cuda_graph else array)

    def caches(self, paged_kv_cache):
        k_cache, v_cache = paged_kv_cache
        demand(k_cache.shape[1 if self.layout == "NHD" else 2] == self.page_size, "pages of another size")
        return k_cache, v_cache


class BatchDecodeWithPagedKVCacheWrapper(Paged):
    def __init__(
        self,
        float_workspace_buffer,
        kv_layout="NHD",
        use_cuda_graph=False,
        use_tensor_cores=False,
        paged_kv_indptr_buffer=None,
        paged_kv_indices_buffer=None,
        paged_kv_last_page_len_buffer=None,
        backend="auto",
        jit_args=None,
    ):
        self.layout, self.use_cuda_graph, self.use_tensor_cores = kv_layout, use_cuda_graph, use_tensor_cores
        self.buffers = {
            "indptr": paged_kv_indptr_buffer,
            "pages": paged_kv_indices_buffer,
            "last_page_len": paged_kv_last_page_len_buffer,
        }

    def plan(
        self,
        indptr,
        indices,
        last_page_len,
        num_qo_heads,
        num_kv_heads,
        head_dim,
        page_size,
        pos_encoding_mode="NONE",
        window_left=-1,
        logits_soft_cap=None,
        q_data_type="float16",
        kv_data_type=None,
        o_data_type=None,
        data_type=None,
        sm_scale=None,
        rope_scale=None,
        rope_theta=None,
        non_blocking=True,
        block_tables=None,
        seq_lens=None,
        fixed_split_size=None,
        disable_split_kv=False,
        q_len_per_req=1,
    ):
        check_lists(indptr, indices, last_page_len, page_size)
        demand(num_qo_heads // num_kv_heads in (1, 2, 3, 4, 8), "a group size that is not built")
        demand(sm_scale is not None, "sm_scale would be 1 / sqrt(head_dim)")
        self.keep(indptr=indptr, pages=indices, last_page_len=last_page_len)
        self.dtype, self.page_size, self.head_dim = q_data_type, page_size, head_dim
        self.sm_scale, self.cap = sm_scale, logits_soft_cap

    def run(
        self,
        q,
        paged_kv_cache,
        *args,
        q_scale=None,
        k_scale=None,
        v_scale=None,
        out=None,
        lse=None,
        return_lse=False,
        enable_pdl=None,
        window_left=None,
        sinks=None,
        q_len_per_req=None,
        skip_softmax_threshold_scale_factor=None,
        kv_cache_sf=None,
    ):
        k_cache, v_cache = self.caches(paged_kv_cache)
        check_paged(q, k_cache, v_cache, out, lse, self.head_dim)
        demand(q.dtype == k_cache.dtype == self.dtype, "another dtype was planned")
        demand(len(q) == len(self.last_page_len), "another number of rows was planned")
        for row in range(len(q)):
            pages = self.pages[self.indptr[row] : self.indptr[row + 1]]
            k, v = (tokens_of(c, self.layout, pages, self.last_page_len[row]) for c in (k_cache, v_cache))
            found = attend(q[row : row + 1], k, v, None, self.sm_scale, self.cap)
            out[row : row + 1], lse[row : row + 1] = found
        return out, lse


class BatchPrefillWithPagedKVCacheWrapper(Paged):
    def __init__(
        self,
        float_workspace_buffer,
        kv_layout="NHD",
        use_cuda_graph=False,
        qo_indptr_buf=None,
        paged_kv_indptr_buf=None,
        paged_kv_indices_buf=None,
        paged_kv_last_page_len_buf=None,
        custom_mask_buf=None,
        mask_indptr_buf=None,
        backend="auto",
        jit_args=None,
        jit_kwargs=None,
    ):
        demand(backend == "fa2", "FA3 has no custom mask")
        self.layout, self.use_cuda_graph = kv_layout, use_cuda_graph
        self.buffers = {
            "qo_indptr": qo_indptr_buf,
            "indptr": paged_kv_indptr_buf,
            "pages": paged_kv_indices_buf,
            "last_page_len": paged_kv_last_page_len_buf,
            "packed": custom_mask_buf,
            "mask_indptr": mask_indptr_buf,
        }

    def plan(
        self,
        qo_indptr,
        paged_kv_indptr,
        paged_kv_indices,
        paged_kv_last_page_len,
        num_qo_heads,
        num_kv_heads,
        head_dim_qk,
        page_size,
        head_dim_vo=None,
        custom_mask=None,
        packed_custom_mask=None,
        causal=False,
        pos_encoding_mode="NONE",
        use_fp16_qk_reduction=False,
        sm_scale=None,
        window_left=-1,
        logits_soft_cap=None,
        rope_scale=None,
        rope_theta=None,
        q_data_type="float16",
        kv_data_type=None,
        o_data_type=None,
        non_blocking=True,
        prefix_len_ptr=None,
        token_pos_in_items_ptr=None,
        token_pos_in_items_len=0,
        max_item_len_ptr=None,
        seq_lens=None,
        seq_lens_q=None,
        block_tables=None,
        max_token_per_sequence=None,
        max_sequence_kv=None,
        fixed_split_size=None,
        disable_split_kv=False,
    ):
        check_lists(paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len, page_size)
        demand(qo_indptr.dtype == torch.int32, "index arrays are not int32")
        bits = qo_indptr.diff() * lengths_of(paged_kv_indptr, paged_kv_last_page_len, page_size)
        demand(custom_mask.dtype == torch.bool and len(custom_mask) == int(bits.sum()), "a mask of other lengths")
        parts = custom_mask.split(bits.tolist())
        packed = [pack(part) for part in parts]
        sizes = torch.tensor([0, *(len(part) for part in packed)], dtype=torch.int32)
        self.keep(
            qo_indptr=qo_indptr,
            indptr=paged_kv_indptr,
            pages=paged_kv_indices,
            last_page_len=paged_kv_last_page_len,
            packed=torch.cat(packed),
            mask_indptr=sizes.cumsum(0).int(),
        )
        self.dtype, self.page_size, self.head_dim = q_data_type, page_size, head_dim_qk
        self.sm_scale, self.cap = sm_scale, logits_soft_cap

    def run(
        self,
        q,
        paged_kv_cache,
        *args,
        q_scale=None,
        k_scale=None,
        v_scale=None,
        out=None,
        lse=None,
        return_lse=False,
        enable_pdl=None,
        window_left=None,
        sinks=None,
        kv_cache_sf=None,
        skip_softmax_threshold_scale_factor=None,
    ):
        k_cache, v_cache = self.caches(paged_kv_cache)
        check_paged(q, k_cache, v_cache, out, lse, self.head_dim)
        demand(q.dtype == k_cache.dtype == self.dtype, "another dtype was planned")
        for n in range(len(self.last_page_len)):
            rows = slice(int(self.qo_indptr[n]), int(self.qo_indptr[n + 1]))
            pages = self.pages[self.indptr[n] : self.indptr[n + 1]]
            k, v = (tokens_of(c, self.layout, pages, self.last_page_len[n]) for c in (k_cache, v_cache))
            size = (rows.stop - rows.start) * len(k)
            mask = unpack(self.packed[self.mask_indptr[n] : self.mask_indptr[n + 1]], size).view(
                rows.stop - rows.start, len(k)
            )
            if rows.stop > rows.start:
                out[rows], lse[rows] = attend(q[rows], k, v, mask, self.sm_scale, self.cap)
        return out, lse


def pack(bits):
    """Eight bits a byte, the first bit lowest."""
    filled = torch.nn.functional.pad(bits.to(torch.uint8), (0, -len(bits) % 8)).view(-1, 8)
    return (filled << torch.arange(8, dtype=torch.uint8)).sum(1).to(torch.uint8)


def unpack(packed, size):
    return ((packed[:, None] >> torch.arange(8, dtype=torch.uint8)) & 1).flatten()[:size].bool()


class BlockSparseAttentionWrapper:
    def __init__(self, float_workspace_buffer, backend="auto"):
        self.backend = backend

    def plan(
        self,
        indptr,
        indices,
        M,
        N,
        R,
        C,
        num_qo_heads,
        num_kv_heads,
        head_dim,
        mask=None,
        packed_mask=None,
        causal=False,
        pos_encoding_mode="NONE",
        use_fp16_qk_reduction=False,
        logits_soft_cap=None,
        sm_scale=None,
        rope_scale=None,
        rope_theta=None,
        q_data_type="float16",
        kv_data_type=None,
        o_data_type="float16",
        non_blocking=True,
    ):
        demand(indptr.dtype == indices.dtype == torch.int32, "index arrays are not int32")
        demand(N % C == 0 and len(indptr) - 1 == -(-M // R), "blocks do not fit")
        demand(indices.numel(), "no block at all")  # its own max() fails on none
        if int(indices.max()) >= N // C:
            raise ValueError("indices out of bound")
        demand(mask is None or mask.shape == (len(indices), R, C), "a mask of other blocks")
        demand(mask is None or self.backend == "fa2", "FA3 has no custom mask")
        demand(q_data_type == o_data_type, "out would have another dtype")
        tiles = torch.zeros(len(indptr) - 1, N // C, R, C, dtype=torch.bool)
        rows = torch.repeat_interleave(torch.arange(len(indptr) - 1), indptr.diff().long())
        tiles[rows, indices.long()] = True if mask is None else mask
        self.mask = tiles.transpose(1, 2).reshape(-1, N)[:M]
        self.sm_scale, self.cap, self.shape = sm_scale, logits_soft_cap, (M, N)

    def run(
        self, q, k, v, scale_q=None, scale_k=None, scale_v=None, out=None, lse=None, return_lse=False, enable_pdl=None
    ):
        demand((len(q), len(k)) == self.shape and q.is_contiguous() and k.is_contiguous(), "other shapes were planned")
        out, lse = attend(q, k, v, self.mask, self.sm_scale, self.cap)
        return out.to(q.dtype), lse


class VariableBlockSparseAttentionWrapper:
    def __init__(self, float_workspace_buffer, backend="auto"):
        self.backend = backend

    def plan(
        self,
        block_mask_map,
        block_row_sz,
        block_col_sz,
        num_qo_heads,
        num_kv_heads,
        head_dim,
        causal=False,
        pos_encoding_mode="NONE",
        use_fp16_qk_reduction=False,
        logits_soft_cap=None,
        sm_scale=None,
        rope_scale=None,
        rope_theta=None,
        non_blocking=True,
        q_data_type="float16",
        kv_data_type=None,
    ):
        shape = (num_kv_heads, block_row_sz.shape[1], block_col_sz.shape[1])
        demand(block_mask_map.shape == shape and block_mask_map.dtype == torch.bool, "a map of other blocks")
        demand(len(block_row_sz) == len(block_col_sz) == num_kv_heads, "sizes are not of every KV head")
        demand(bool(block_mask_map.any()), "no block at all")  # its own expansion of blocks fails on none
        self.masks = [
            each.repeat_interleave(rows, 0).repeat_interleave(columns, 1)
            for each, rows, columns in zip(block_mask_map, block_row_sz, block_col_sz, strict=True)
        ]
        self.sm_scale, self.cap = sm_scale, logits_soft_cap

    def run(self, q, k, v, out=None, lse=None, return_lse=False, enable_pdl=None):
        group = len(q) // len(k)
        parts = [
            attend(
                q[h * group : (h + 1) * group].transpose(0, 1),
                k[h][:, None],
                v[h][:, None],
                mask,
                self.sm_scale,
                self.cap,
            )
            for h, mask in enumerate(self.masks)
        ]
        out, lse = (torch.cat(several, 1).transpose(0, 1) for several in zip(*parts, strict=True))
        return out.to(q.dtype), lse


def merge_states(v, s):
    """(rows, states, heads, dim) and base-2 lse to one state; where all are empty, empty."""
    demand(v.is_contiguous() and s.is_contiguous() and s.dtype == torch.float32, "states have gaps")
    lse = torch.logsumexp(s * math.log(2), 1) / math.log(2)
    weights = torch.exp2(s - lse[:, None]).nan_to_num(0.0)
    return (v.float() * weights[..., None]).sum(1).to(v.dtype), lse


def merge_state(v_a, s_a, v_b, s_b):
    return merge_states(torch.stack([v_a, v_b], 1), torch.stack([s_a, s_b], 1))
