"""What must be said of operators one by one: which can't be compared, and which are linear."""

from __future__ import annotations

INCOMPARABLE: dict[str, str] = {
    "empty": "uninitialised memory",
    "empty_like": "uninitialised memory",
    "empty_permuted": "uninitialised memory",
    "empty_strided": "uninitialised memory",
    "new_empty": "uninitialised memory",
    "new_empty_strided": "uninitialised memory",
    "resize_": "uninitialised memory where it grows",
    "resize_as_": "uninitialised memory where it grows",
}
"""Operators whose values are not compared, with the reason; structure, shape and dtype are."""

ALL = None

_ARITHMETIC = """
    add sub rsub __radd__ __rsub__ neg positive cat stack hstack vstack dstack column_stack _chunk_cat block_diag lerp sum
    mean trace cumsum diff trapz trapezoid cumulative_trapezoid gradient sum_to_size mm bmm mv dot vdot inner outer kron
    einsum tensordot matmul __rmatmul__ addmm addmm.decomposed addmv addbmm baddbmm addr cross linalg.cross linalg.vecdot
    linalg.multi_dot mul __rmul__ addcmul
"""
_SHAPES = """
    clone contiguous alias_copy diagonal diagonal_copy diagonal_scatter diag diag_embed diagflat linalg.diagonal expand
    expand_as expand_copy broadcast_to broadcast_tensors flatten unflatten ravel reshape reshape_as view view_as view_copy
    permute permute_copy transpose transpose_copy t t_copy T mT movedim squeeze squeeze.multiple squeeze_copy unsqueeze
    unsqueeze_copy narrow narrow_copy select slice split split.list_args unsafe_split split_with_sizes split_with_sizes_copy
    chunk unsafe_chunk tensor_split hsplit vsplit dsplit unbind unbind_copy unfold unfold_copy roll rot90 flip fliplr flipud
    repeat tile repeat_interleave tril triu select_scatter slice_scatter atleast_1d atleast_2d atleast_3d
    meshgrid.variadic_tensors meshgrid.list_of_tensors real conj conj_physical H mH
"""
_INDEXING = """
    __getitem__ gather take take_along_dim index_select index_add index_copy index_put scatter_add masked_select where
"""
_FOURIER = """
    fft.fft fft.fft2 fft.fftn fft.ifft fft.ifft2 fft.ifftn fft.rfft fft.rfft2 fft.rfftn fft.fftshift fft.ifftshift
"""
_LAYERS = """
    nn.functional.linear nn.functional.bilinear nn.functional.conv1d nn.functional.conv2d nn.functional.conv3d
    nn.functional.conv_transpose1d nn.functional.conv_transpose2d nn.functional.conv_transpose3d nn.functional.avg_pool1d
    nn.functional.avg_pool2d nn.functional.avg_pool3d nn.functional.adaptive_avg_pool1d nn.functional.adaptive_avg_pool2d
    nn.functional.adaptive_avg_pool3d nn.functional.unfold nn.functional.pixel_shuffle nn.functional.pixel_unshuffle
    nn.functional.channel_shuffle nn.functional.interpolate.linear nn.functional.interpolate.bilinear
    nn.functional.interpolate.nearest nn.functional.upsample_bilinear nn.functional.upsample_nearest constant_pad_nd
    nn.functional.pad.constant nn.functional.pad.reflect nn.functional.pad.replicate nn.functional.pad.circular
    nn.functional.embedding
"""
_MASKED = """
    masked.sum masked.mean
"""

LINEAR: dict[str, tuple[int, ...] | None] = {
    **{name: ALL for group in (_ARITHMETIC, _SHAPES, _INDEXING, _FOURIER, _LAYERS, _MASKED) for name in group.split()},
    "div.no_rounding_mode": (0,),
    "true_divide": (0,),
    "addcdiv": (0, 1),
    "masked_fill": (0,),
    "scatter_reduce.sum": ALL,
}
"""Operators that are linear (or affine) in each of the tensor arguments with these numbers; ``ALL`` for all of them.

These arguments are also tried as ``Partial``. Others are not: rounding in the sum may turn what is discontinuous.
"""
