"""Records a candidate trace from a real model. Needs the extra `trace-record`; nothing else here imports it."""
