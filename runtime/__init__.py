"""The fixed-memory runtime: cache, attention function, block loop, plan, session, chat."""
