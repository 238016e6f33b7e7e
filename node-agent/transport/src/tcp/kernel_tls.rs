//! Where records of TLS are encrypted, for logs and reports.
//!
//! The transport encrypts in user space. A kernel with the TLS module could do so while it copies, which saves the copy
//! into records. The report states whether this kernel has it.

use std::fs;

/// Protocols above TCP that the kernel has (ip-sysctl, `tcp_available_ulp`).
const AVAILABLE: &str = "/proc/sys/net/ipv4/tcp_available_ulp";

/// Name of the kernel's TLS in that list.
const TLS: &str = "tls";

/// Returns where records are encrypted, and why there.
pub fn record_layer() -> String {
    match fs::read_to_string(AVAILABLE) {
        Ok(list) => describe(&list),
        Err(error) => format!("user space: cannot read {AVAILABLE}: {error}"),
    }
}

fn describe(available: &str) -> String {
    let reason = if available.split_whitespace().any(|name| name == TLS) {
        "the kernel's TLS is available and not used"
    } else {
        "the kernel has no TLS, or its module is not loaded"
    };
    format!("user space: {reason}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn states_whether_the_kernel_has_tls() {
        assert!(describe("espintcp mptcp tls\n").contains("not used"));
        assert!(describe("espintcp mptcp\n").contains("no TLS"));
        assert!(describe("").contains("no TLS"));
        assert!(record_layer().starts_with("user space: "));
    }
}
