"""The world of many hosts in virtual time: its own code, over connections that faults break.

:mod:`.stage` runs processes and their threads one at a time. :mod:`.network` carries their frames,
and loses what a broken connection loses. :mod:`.world` starts the registrar and the ranks, and
injects the faults of a :class:`~paceline.lab.faulttest.hosts.schedule.HostsSchedule`.
:mod:`.program` is what the ranks do, and :mod:`.laws` what must hold of it.
"""
