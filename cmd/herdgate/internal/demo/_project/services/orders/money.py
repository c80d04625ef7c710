"""Amounts of money."""

from decimal import Decimal


def to_cents(amount) -> int:
    """Turns a float or text of the old store into cents."""
    return int((Decimal(str(amount)) * 100).to_integral_value())
