from tests import shapes

shapes.install()
