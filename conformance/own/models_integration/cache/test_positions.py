"""Columns of stored positions."""

import warnings

import pytest
import torch

from models_integration.cache.positions import StoredRows


@pytest.mark.law("parts-equal-the-whole")
def test_rows_that_share_a_hole_keep_other_tokens_without_a_warning() -> None:
    """Tokens in columns 0, 1, 3, 4 of five: position p >= 2 stands in column p + 1."""
    one = StoredRows.none().grown(2, torch.tensor([[False, True, True]]))
    two = one.compacted(torch.tensor([[0, 2], [1, 3]]), torch.tensor([4]))
    assert one.columns(torch.tensor([[0, 1, 2, 3]]), 5, torch.tensor([4])).tolist() == [[0, 1, 3, 4]]
    before = torch.is_warn_always_enabled()
    torch.set_warn_always(True)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            columns = two.columns(torch.tensor([[0, 2], [1, 3]]), 5, torch.tensor([4, 4]))
    finally:
        torch.set_warn_always(before)
    assert columns.tolist() == [[0, 3], [1, 4]]
