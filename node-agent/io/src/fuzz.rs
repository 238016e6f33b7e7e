//! Fuzz target of data of devices (`make fuzz`): signatures of other formats, and the health log of a drive.

use crate::signature::foreign_signature;
use crate::smart::HealthLog;

#[test]
fn device_pages() {
    let mut boot = vec![0; 512];
    boot[510..].copy_from_slice(b"\x55\xaa");
    reprise_fuzz::check("device_pages", &[boot, b"LUKS\xba\xbe".to_vec(), b"REPRISE\0".to_vec()], |input| {
        let signature = foreign_signature(input);
        assert!(signature.is_none() || !input.starts_with(b"REPRISE\0"), "a pool is not foreign");
        let mut page = [0; 512];
        let count = input.len().min(page.len());
        page[..count].copy_from_slice(&input[..count]);
        assert!(HealthLog::parse(&page).spare_percent.is_none_or(|percent| percent <= 100));
    });
}
