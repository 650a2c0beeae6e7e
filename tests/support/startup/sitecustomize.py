"""Every Python that a test starts loads this first: its accesses count as the test's."""

import outside

outside.watch()
