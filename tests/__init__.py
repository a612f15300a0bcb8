import os

if os.environ.get("TOKENSWIFT_SHAPES") != "0":
    from tests import shapes  # takes seconds, which small programs of the tests do without

    shapes.install()
