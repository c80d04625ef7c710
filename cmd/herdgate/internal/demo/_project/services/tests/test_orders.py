"""Tests of the order endpoints."""

from orders.app import create_app
from orders.clients import legacy_client


def test_unknown_order_is_404(monkeypatch):
    monkeypatch.setattr(legacy_client, "fetch_order", lambda order_id: None)
    assert create_app().test_client().get("/orders/o-1").status_code == 404


def test_store_and_service_agree(live_store):
    stored = legacy_client.fetch_order(live_store.order_id)
    shown = create_app().test_client().get(f"/orders/{live_store.order_id}").get_json()
    assert shown == stored
