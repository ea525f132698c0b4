"""
Calibration: everything that a `Machine` holds, measured with the executor that runs products.

`statistics`, `fitting`, `ports`, `probes`, `assemble` and `report` are pure (numpy only); `workbench`,
`power` and `measuring` run on the ranks' devices.
"""
