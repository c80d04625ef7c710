"""HTTP application of the order service."""

from flask import Flask

from orders.api import orders, refunds, search


def create_app() -> Flask:
    app = Flask("orders")
    app.register_blueprint(orders.blueprint, url_prefix="/orders")
    app.register_blueprint(refunds.blueprint, url_prefix="/refunds")
    app.register_blueprint(search.blueprint, url_prefix="/search")
    return app
