//! Harness of the end-to-end tests: real processes of Reprise in a temporary directory.
