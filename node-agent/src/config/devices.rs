//! Validation of the devices of a pool: files, block devices, and NVMe controllers.

use std::path::PathBuf;

use reprise_agent_core::pool::DEVICE_BYTES_MAX;
use reprise_io::{ControllerDescription, DeviceDescription, IfMissing, Reserve};
use reprise_policy::layout::PAGE_BYTES;

use super::settings::{refuse, size};
use super::{DeviceSection, DeviceSettings};
use crate::error::AgentError;

/// Maximum length of the serial number of an NVMe controller.
const SERIAL_CHARS_MAX: usize = 20;

/// Minimum size of a device; smaller values are mistakes of the unit. The pool checks its actual
/// requirements.
const DEVICE_BYTES_MIN: u64 = 1 << 20;

impl DeviceSection {
    pub(super) fn validate(&self, reserve: Reserve) -> Result<DeviceSettings, AgentError> {
        let description = self.describe()?;
        let bytes = (self.bytes.0 != 0).then_some(self.bytes.0);
        if let Some(bytes) = bytes {
            size("pool.devices.bytes", bytes, (DEVICE_BYTES_MIN, DEVICE_BYTES_MAX, PAGE_BYTES))?;
        }
        // A file has a size; a device need not have one.
        let missing = if bytes.is_some() { IfMissing::Create } else { IfMissing::Fail };
        Ok(DeviceSettings { description, bytes, missing, reserve })
    }

    fn describe(&self) -> Result<DeviceDescription, AgentError> {
        let path = |path: &PathBuf| Some(path.clone()).filter(|path| !path.as_os_str().is_empty());
        let pci = Some(self.pci.as_str()).filter(|pci| !pci.is_empty());
        if pci.is_none() {
            self.refuse_controller_fields()?;
        }
        match (path(&self.path), pci, path(&self.emulated)) {
            (Some(path), None, None) => Ok(DeviceDescription::Path(path)),
            (None, Some(pci), None) => self.describe_controller(pci).map(DeviceDescription::Controller),
            (None, None, Some(path)) => Ok(DeviceDescription::Emulated(path)),
            (None, None, None) => Err(refuse(
                "pool.devices.path",
                "",
                "the path of a file or block device (or pci, or emulated)",
            )),
            (_, Some(pci), _) => Err(refuse("pool.devices.pci", pci, "one of path, pci and emulated")),
            (Some(_), None, Some(emulated)) => {
                let found = emulated.display().to_string();
                Err(refuse("pool.devices.emulated", &found, "one of path, pci and emulated"))
            }
        }
    }

    fn refuse_controller_fields(&self) -> Result<(), AgentError> {
        let only = "no value without pool.devices.pci";
        match (self.serial.as_str(), self.namespace) {
            ("", 0) => Ok(()),
            ("", namespace) => Err(refuse("pool.devices.namespace", &namespace.to_string(), only)),
            (serial, _) => Err(refuse("pool.devices.serial", serial, only)),
        }
    }

    fn describe_controller(&self, pci: &str) -> Result<ControllerDescription, AgentError> {
        let expected = "a PCI address like 0000:3b:00.0";
        let address = pci.parse().map_err(|_| refuse("pool.devices.pci", pci, expected))?;
        // Serial numbers have at most 20 ASCII characters (NVMe Base 2.0, 5.17.2.1).
        let fits = self.serial.len() <= SERIAL_CHARS_MAX
            && self.serial.bytes().all(|byte| byte.is_ascii_graphic() || byte == b' ');
        if !fits || self.serial.trim() != self.serial {
            let allowed = format!("at most {SERIAL_CHARS_MAX} ASCII characters, without spaces at the ends");
            return Err(refuse("pool.devices.serial", &self.serial, &allowed));
        }
        let serials = Some(self.serial.clone()).filter(|serial| !serial.is_empty()).into_iter().collect();
        let namespace = Some(self.namespace).filter(|namespace| *namespace != 0);
        Ok(ControllerDescription { address, serials, namespace })
    }
}

#[cfg(test)]
mod tests {
    use reprise_io::DeviceDescription;

    use crate::config::Config;

    #[test]
    fn device_is_a_path_or_the_pci_address_of_a_controller_or_emulated() {
        let text = "[[pool.devices]]\npath = \"/x\"\n\
            [[pool.devices]]\npci = \"0000:3B:00.0\"\nbytes = \"1TiB\"\nserial = \"S 1\"\nnamespace = 2\n\
            [[pool.devices]]\nemulated = \"/y\"\nbytes = \"1GiB\"";
        let settings = Config::parse(text).expect("parses").validate().expect("valid");
        let devices = settings.pool.devices.iter();
        let devices: Vec<_> = devices.map(|device| (device.description.to_string(), device.bytes)).collect();
        let expected = [
            ("/x".to_owned(), None),
            ("pci:0000:3b:00.0/2".to_owned(), Some(1 << 40)),
            ("emulated:/y".to_owned(), Some(1 << 30)),
        ];
        assert_eq!(devices, expected);
        let DeviceDescription::Controller(controller) = &settings.pool.devices[1].description else {
            panic!("a controller")
        };
        assert_eq!(controller.serials, ["S 1"]);
    }
}
