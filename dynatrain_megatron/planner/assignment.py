"""Which row takes which column so that the sum of what they are worth together is the most.

For many small square tables at once, or one large one, in exact integers: the shortest augmenting
path method (Jonker and Volgenant, 1987), all tables in step. Rows come one by one; each looks for
the cheapest chain of rows that change their column so that it gets one too::

    row 2 wants column 0      columns  0  1  2
    row 0, which has it,      row 0    a     b      row 2 -> 0, row 0 -> 2
    takes column 2 instead    row 1       c
                              row 2    d
"""

from __future__ import annotations

import numpy as np

from dynatrain_megatron.vps.boxes import IntArray

_FAR = np.iinfo(np.int64).max


def assign(worth: IntArray) -> IntArray:
    """The column of each row, [b, n], with the greatest sum in each table of ``worth`` [b, n, n].

    Numbers are between 0 and 2⁶¹. Of several equal assignments it is always the same one.
    """
    number, size, _ = worth.shape
    cost = worth.max(axis=(1, 2), initial=0)[:, None, None] - worth
    price = np.zeros((number, size), dtype=np.int64)  # of each column; what it costs to free it
    owner = np.full((number, size), -1)  # the row that has each column
    column = np.full((number, size), -1)
    for row in range(size):
        _add_row(row, cost, price, owner, column)
    return column


def _add_row(row: int, cost: IntArray, price: IntArray, owner: IntArray, column: IntArray) -> None:
    """Give ``row`` of every table a column, along a cheapest chain."""
    table = np.arange(len(cost))  # those not done yet
    length = cost[:, row] - price  # of the cheapest chain found that ends at each column
    before = np.full_like(owner, row)  # the row before it in the chain
    final = np.zeros(owner.shape, dtype=np.bool_)
    while len(table):
        open_ = np.where(final, _FAR, length)
        least = open_.min(axis=1)
        nearest = open_ == least[:, None]
        free = nearest & (owner[table] < 0)
        end = free.any(axis=1)
        at = np.where(end, free.argmax(axis=1), nearest.argmax(axis=1))
        if end.any():
            done = table[end]
            price[done] += np.where(final[end], length[end] - least[end, None], 0)
            _follow(row, done, at[end], before[end], owner, column)
            rest = ~end
            table, at, least = table[rest], at[rest], least[rest]
            length, before, final = length[rest], before[rest], final[rest]
        final[np.arange(len(table)), at] = True
        other = owner[table, at]
        base = cost[table, other, at] - price[table, at] - least
        onward = cost[table, other] - price[table] - base[:, None]
        shorter = ~final & (onward < length)
        length = np.where(shorter, onward, length)
        before = np.where(shorter, other[:, None], before)


def _follow(
    row: int, table: IntArray, at: IntArray, before: IntArray, owner: IntArray, column: IntArray
) -> None:
    """Go back along the chains that end at column ``at`` [len(table)] and change hands."""
    index = np.arange(len(table))
    while len(index):
        taker = before[index, at]
        owner[table[index], at] = taker
        given_up = column[table[index], taker]
        column[table[index], taker] = at
        on = taker != row
        index, at = index[on], given_up[on]
