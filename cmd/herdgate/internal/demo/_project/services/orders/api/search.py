"""Search over orders; reads the index only."""

from flask import Blueprint, jsonify, request

from orders.clients import order_client

blueprint = Blueprint("search", __name__)


@blueprint.get("/")
def search():
    hits = order_client.find_orders(request.args.get("q", ""), limit=50)
    return jsonify([hit.id for hit in hits])
