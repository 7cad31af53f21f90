"""Sequence parallelism by exchanged heads (Ulysses, arXiv 2309.14509), for packed groups of text and of pictures.

The ranks of a group work on the same microbatches: each holds a slice of the packed tokens through the whole model, and
for attention alone all tokens of a part of the heads. The vision tower's pictures are shared out among them.
"""

import types
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import PreTrainedModel

from r1.parallel import SequenceGroup
from r1.policy.logprobs import Head, Scored

Attention = Callable[..., tuple[Tensor, None]]


def split_sequence(model: PreTrainedModel, group: SequenceGroup | None) -> None:
    """Have a loaded model compute its slice of each microbatch; its forward takes and returns whole ones as before.

    Microbatches must be packed to a multiple of the group's size (`pack`'s multiple_of), and be the same on all its
    ranks. With None nothing changes.

    What is scored comes back whole on every rank of the group, and its gradient reaches only the rows that this rank
    scored: the loss of a microbatch is computed size times, and counts once. So the gradients of all ranks, summed, are
    those of the whole loss, as without sequence parallelism.
    """
    if group is None:
        return
    base: Any = model.model
    text = getattr(base, "language_model", base)
    text.register_forward_pre_hook(lambda _, args, kwargs: (args, _slice_inputs(kwargs, group)), with_kwargs=True)
    if hasattr(base, "visual"):
        _share_pictures(base.visual, group)
    whole_forward: Callable[..., Any] = model.forward

    def forward(self: Any, inputs: dict[str, Tensor], packing: Any, hidden_index: Tensor, *scoring: Any) -> Any:
        tokens, rows = inputs["input_ids"].shape[1], len(hidden_index)
        assert tokens % group.size == 0, f"{tokens} packed tokens do not divide over {group.size} ranks"
        share = tokens // group.size
        mine = (hidden_index // share == group.rank).nonzero()[:, 0]
        count = len(mine)
        if count == 0 and rows:  # the head runs all the same: its gradients are reduced over ranks
            mine = mine.new_zeros(1)
            hidden_index = torch.full_like(hidden_index, group.rank * share)
        local = whole_forward(inputs, packing, hidden_index[mine] - group.rank * share, *_rows(scoring, mine))
        if isinstance(local, Scored):
            columns = [local.logprobs, local.entropy, *([] if local.kl is None else [local.kl])]
            whole = _gather_columns(torch.stack(columns)[:, :count], mine[:count], rows, group)
            return Scored(logprobs=whole[0], entropy=whole[1], kl=None if local.kl is None else whole[2])
        if scoring:  # hidden states of the reference, for the rows that this rank scores
            return local
        return _gather_columns(local[None, :count], mine[:count], rows, group)[0]

    model.forward = types.MethodType(forward, model)


def own_positions(positions: Tensor, num_tokens: int, group: SequenceGroup | None) -> Tensor:
    """Those of some packed positions that lie in this rank's slice, counted from its start."""
    if group is None:
        return positions
    share = num_tokens // group.size
    return positions[positions // share == group.rank] - group.rank * share


def _rows(scoring: Sequence[Any], mine: Tensor) -> list[Any]:
    """Labels of the rows that this rank scores; the head as it is."""
    return [x if x is None or isinstance(x, Head) else x[mine] for x in scoring]


def _slice_inputs(kwargs: dict[str, Any], group: SequenceGroup) -> dict[str, Any]:
    """A language model's keyword arguments, cut to this rank's tokens; pictures may lie across the cut."""
    sliced = dict(kwargs)
    for name, dim in (("input_ids", 1), ("inputs_embeds", 1), ("position_ids", -1), ("visual_pos_masks", 1)):
        if kwargs.get(name) is not None:
            sliced[name] = kwargs[name].chunk(group.size, dim)[group.rank]
    if kwargs.get("deepstack_visual_embeds") is not None:
        parts = [int(part.sum()) for part in kwargs["visual_pos_masks"].chunk(group.size, 1)]
        start = sum(parts[: group.rank])
        rows = slice(start, start + parts[group.rank])
        sliced["deepstack_visual_embeds"] = [features[rows] for features in kwargs["deepstack_visual_embeds"]]
    return sliced


def head_shares(num_heads: int, num_kv_heads: int, size: int) -> list[tuple[slice, slice]]:
    """(query heads, key and value heads that they attend to) of each rank.

    Query heads are shared out as evenly as they go, none twice; a key head goes to each rank that has queries for it.
    """
    per_kv = num_heads // num_kv_heads
    shares = []
    for rank in range(size):
        first, end = num_heads * rank // size, num_heads * (rank + 1) // size
        kv_end = -(-end // per_kv) if end > first else first // per_kv
        shares.append((slice(first, end), slice(first // per_kv, kv_end)))
    return shares


def over_heads(attention: Attention, group: SequenceGroup | None) -> Attention:
    """An attention function of [1, H, tokens, D] that is given this rank's tokens and runs on all, of its heads."""
    if group is None:
        return attention

    def exchanged(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None,
                  **options: Any) -> tuple[Tensor, None]:  # fmt: skip
        num_heads, num_kv_heads = query.shape[1], key.shape[1]
        shares = head_shares(num_heads, num_kv_heads, group.size)
        q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))  # [T / size, H, D]
        mine = cast(Tensor, _TokensToHeads.apply(q, k, v, shares, group))  # [T, q + k + v heads, D]
        heads, kv_heads = shares[group.rank]
        own, own_kv = heads.stop - heads.start, kv_heads.stop - kv_heads.start
        q, k, v = mine.split([own, own_kv, own_kv], 1)
        if own:
            places = torch.arange(heads.start, heads.stop) // (num_heads // num_kv_heads) - kv_heads.start
            if own % own_kv or not torch.equal(places, torch.arange(own) // (own // own_kv)):
                # Unequal numbers of queries a key: no kernel takes that, so each query gets a key of its own.
                k, v = (torch.stack([x[:, int(i)] for i in places], 1) for x in (k, v))
            q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
            out, _ = attention(module, q, k, v, attention_mask, **options)  # [1, T, own, D]
        else:
            out = q[None]  # more ranks than heads; the exchange back is collective
        whole = cast(Tensor, _HeadsToTokens.apply(out[0], [s for s, _ in shares], group))
        return whole[None], None

    return exchanged


def _exchange(send: Sequence[Tensor], sizes: Sequence[torch.Size], group: SequenceGroup) -> list[Tensor]:
    """Send one tensor to each rank of the group, and receive one of the given shape from each."""
    flat = torch.cat([x.reshape(-1) for x in send])
    counts = [size.numel() for size in sizes]
    received = flat.new_empty(sum(counts))
    dist.all_to_all_single(received, flat, counts, [x.numel() for x in send], group=group.process_group)
    return [part.view(size) for part, size in zip(received.split(counts), sizes, strict=True)]


class _TokensToHeads(torch.autograd.Function):
    """[T / size, H, D] of all heads -> [T, own heads, D]: this rank's queries, then their keys and values."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, shares: list[tuple[slice, slice]],
                group: SequenceGroup) -> Tensor:  # fmt: skip
        assert q.shape[-1] == k.shape[-1] == v.shape[-1], "heads of queries, keys and values differ in size"
        ctx.shares, ctx.group, ctx.kv_shape = shares, group, k.shape
        send = [torch.cat([q[:, heads], k[:, kv], v[:, kv]], 1) for heads, kv in shares]
        return torch.cat(_exchange(send, [send[group.rank].shape] * group.size, group))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,), group = gradients, ctx.group
        tokens, _, dim = ctx.kv_shape
        widths = [(h.stop - h.start, kv.stop - kv.start) for h, kv in ctx.shares]
        sizes = [torch.Size((tokens, own + 2 * own_kv, dim)) for own, own_kv in widths]
        parts = _exchange(gradient.chunk(group.size), sizes, group)
        # float32: a key head's gradient is a sum over the ranks that have queries for it
        grad_k, grad_v = (gradient.new_zeros(ctx.kv_shape, dtype=torch.float32) for _ in range(2))
        queries = []
        for part, (_, kv), (own, own_kv) in zip(parts, ctx.shares, widths, strict=True):
            q, k, v = part.split([own, own_kv, own_kv], 1)
            queries.append(q)
            grad_k[:, kv] += k
            grad_v[:, kv] += v
        return torch.cat(queries, 1), grad_k.to(gradient.dtype), grad_v.to(gradient.dtype), None, None


class _HeadsToTokens(torch.autograd.Function):
    """[T, own heads, D] -> [T / size, H, D]: back to this rank's tokens and all heads."""

    @staticmethod
    def forward(ctx: Any, out: Tensor, shares: list[slice], group: SequenceGroup) -> Tensor:
        ctx.shares, ctx.group, ctx.shape = shares, group, out.shape
        tokens, _, dim = out.shape
        sizes = [torch.Size((tokens // group.size, s.stop - s.start, dim)) for s in shares]
        return torch.cat(_exchange(out.chunk(group.size), sizes, group), 1)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,), group = gradients, ctx.group
        tokens, own, dim = ctx.shape
        sizes = [torch.Size((tokens // group.size, own, dim))] * group.size
        return torch.cat(_exchange([gradient[:, heads] for heads in ctx.shares], sizes, group)), None, None


class _GatherColumns(torch.autograd.Function):
    """[C, own rows] -> [C, rows] on every rank; the gradient is that of the own rows, without a collective."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, mine: Tensor, rows: int, group: SequenceGroup) -> Tensor:
        ctx.save_for_backward(mine)
        whole = values.new_zeros(len(values), rows)
        whole[:, mine] = values
        dist.all_reduce(whole, group=group.process_group)  # a row is one rank's own: the others add 0 to it
        return whole

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (mine,) = ctx.saved_tensors
        return gradients[0][:, mine], None, None, None


def _gather_columns(values: Tensor, mine: Tensor, rows: int, group: SequenceGroup) -> Tensor:
    return cast(Tensor, _GatherColumns.apply(values, mine, rows, group))


class _GatherRows(torch.autograd.Function):
    """[own rows, H] -> [all rows, H] in rank order; the gradient is summed over the ranks in float32."""

    @staticmethod
    def forward(ctx: Any, features: Tensor, counts: list[int], group: SequenceGroup) -> Tensor:
        ctx.counts, ctx.group = counts, group
        padded = features.new_zeros(max(counts), features.shape[1])
        padded[: len(features)] = features
        every = [torch.empty_like(padded) for _ in counts]
        dist.all_gather(every, padded, group=group.process_group)
        return torch.cat([part[:count] for part, count in zip(every, counts, strict=True)])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,), counts, group = gradients, ctx.counts, ctx.group
        own = torch.Size((counts[group.rank], gradient.shape[1]))
        parts = _exchange(gradient.split(counts), [own] * group.size, group)
        return torch.stack(parts).float().sum(0).to(gradient.dtype), None, None


def share_frames(patches: Sequence[int], size: int) -> list[slice]:
    """Consecutive frames for each rank, of about equal patches: a frame goes to the rank that its middle falls to."""
    total, before, owners = sum(patches), 0, []
    for count in patches:
        owners.append((2 * before + count) * size // (2 * total))
        before += count
    return [slice(sum(o < rank for o in owners), sum(o <= rank for o in owners)) for rank in range(size)]


def _share_pictures(visual: Any, group: SequenceGroup) -> None:
    """Have each rank of the group run the vision tower on its share of the frames, and receive the others' features.

    A picture is one frame, a video as many as its grid has steps in time: the tower attends within each.
    """
    whole_forward: Callable[..., Any] = visual.forward

    def forward(self: Any, pixels: Tensor, grid_thw: Tensor, **kwargs: Any) -> Any:
        grid = grid_thw.repeat_interleave(grid_thw[:, 0], dim=0)
        grid[:, 0] = 1
        patches = grid.prod(dim=1).tolist()
        shares = share_frames(patches, group.size)
        counts = [sum(patches[share]) // self.spatial_merge_size**2 for share in shares]
        mine = shares[group.rank]
        first = sum(patches[: mine.start])
        own_pixels, own_grid = pixels[first : first + sum(patches[mine])], grid[mine]
        if not len(own_grid):  # a blank one: FSDP's collectives pair up, and its features are not taken
            own_pixels = pixels.new_zeros(self.spatial_merge_size**2, pixels.shape[1])
            own_grid = grid.new_tensor([[1, self.spatial_merge_size, self.spatial_merge_size]])
        out = whole_forward(own_pixels, grid_thw=own_grid, **kwargs)
        deeper = getattr(out, "deepstack_features", None) or []
        features = torch.cat([out.pooler_output, *deeper], 1)[: counts[group.rank]]
        whole = cast(Tensor, _GatherRows.apply(features, counts, group))
        out.pooler_output, *deeper = whole.chunk(1 + len(deeper), 1)
        if deeper:
            out.deepstack_features = deeper
        return out

    visual.forward = types.MethodType(forward, visual)
