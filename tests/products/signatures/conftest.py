"""The ops of the table, which compilers need to look at in the tests of this folder alone."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from products.typed_ops import OPS

from customops._dispatch import fingerprint

fingerprint.ops.difference_update(OPS.values())


@pytest.fixture(scope="module", autouse=True)
def _ops_of_the_table() -> Iterator[None]:
    """A compilation looks at all ops that there are, because a formula may call any: 72 take a while."""
    fingerprint.ops.update(OPS.values())
    yield
    fingerprint.ops.difference_update(OPS.values())
