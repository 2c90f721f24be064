"""A model as named, ordered, flat fragments: what peers must agree on, and the way in and out of a model.

A fragment is the slice of the parameters that one round synchronises. Its flat form is a float32 vector on the
CPU, parameters one after another in the order of ``named_parameters``; every digest is taken over that form.
Beside them a schema has the buffers, and a digest of each parameter that is not trained.
"""

from decentral.parameters.model import (
    Layout,
    buffer_spec,
    buffers_of,
    combine_digests,
    copy_tensors,
    digest,
    first_non_finite,
    frozen_digest,
    gather,
    gather_buffers,
    in_dtype_of,
    overwrite,
    parameters_named,
    parameters_of,
    parts_of,
    put_buffer,
    scatter,
    scatter_buffers,
    schema_of,
    split,
)
from decentral.parameters.schema import BufferSpec, Fragment, FrozenSpec, ParameterSpec, Schema

__all__ = [
    "BufferSpec",
    "Fragment",
    "FrozenSpec",
    "Layout",
    "ParameterSpec",
    "Schema",
    "buffer_spec",
    "buffers_of",
    "combine_digests",
    "copy_tensors",
    "digest",
    "first_non_finite",
    "frozen_digest",
    "gather",
    "gather_buffers",
    "in_dtype_of",
    "overwrite",
    "parameters_named",
    "parameters_of",
    "parts_of",
    "put_buffer",
    "scatter",
    "scatter_buffers",
    "schema_of",
    "split",
]
