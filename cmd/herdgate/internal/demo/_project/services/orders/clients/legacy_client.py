"""Client of the old order store.

Deprecated since 4.2: replace ``legacy_client.fetch_order(...)`` by
``order_client.get_order(...)``, see docs/migration.md.
"""

import warnings

import requests

BASE_URL = "http://order-store.internal/v1"


def fetch_order(order_id: str, include_history: bool = False):
    """Returns the order as a dictionary, or None."""
    warnings.warn("fetch_order is deprecated", DeprecationWarning, stacklevel=2)
    params = {"history": "1"} if include_history else {}
    answer = requests.get(f"{BASE_URL}/orders/{order_id}", params=params, timeout=5)
    if answer.status_code == 404:
        return None
    answer.raise_for_status()
    return answer.json()


def fetch_order_ids(day: str) -> list[str]:
    """Returns the ids of one day's orders. Not deprecated yet."""
    answer = requests.get(f"{BASE_URL}/days/{day}", timeout=5)
    answer.raise_for_status()
    return answer.json()["ids"]
