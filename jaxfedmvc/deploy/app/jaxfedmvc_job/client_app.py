"""What a SuperNode of Flower's would run: nothing, since nodes are `python -m jaxfedmvc.deploy`."""

from flwr.clientapp import ClientApp

app = ClientApp()
