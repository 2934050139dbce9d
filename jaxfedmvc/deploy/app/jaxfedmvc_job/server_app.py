"""The server's side of a job."""

from jaxfedmvc.deploy.flower import server_app

app = server_app()
