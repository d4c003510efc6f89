"""Elastic training: a run that goes on with the nodes that are left when one fails, and with more
when one is added.

`Supervisor`, one on each node, exchanges leases with the others through a folder that all nodes
share (`membership`), decides with them which nodes train next and in which layout (`decision`,
`layout_choice`), and starts and ends the ranks of its node (`node_ranks`).
"""
