"""The paper's tables and figures as experiments: specs, runner, report (see `specs`)."""
