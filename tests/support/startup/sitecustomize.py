"""Every Python that a test starts loads this first: what it looks at is the test's doing."""

import outside

outside.watch()
