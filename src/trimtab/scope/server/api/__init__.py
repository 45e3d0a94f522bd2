"""The endpoints of the API, a module for each subject; :mod:`trimtab.scope.server.api.table` has them all."""
