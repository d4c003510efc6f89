"""Programs of the command line; `rftmega` runs them as well."""
