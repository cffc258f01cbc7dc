"""Two hosts with a link between them: real frames that can be lost, delayed and cut, and a host that can die."""
