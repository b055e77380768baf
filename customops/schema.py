"""Schema inference: `infer_schema`, the tables of supported types, and `tuple_to_list`."""

from torch import Tensor as _TestTensor  # noqa: F401 - annotations of user functions must not resolve to it

from customops._schema.infer import infer_schema as infer_schema
from customops._schema.types import SUPPORTED_PARAM_TYPES as SUPPORTED_PARAM_TYPES
from customops._schema.types import SUPPORTED_RETURN_TYPES as SUPPORTED_RETURN_TYPES
from customops._schema.types import tuple_to_list as tuple_to_list
