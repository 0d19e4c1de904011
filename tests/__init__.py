"""Tests of the project; a regular package so that no installed package of that name can shadow it."""
