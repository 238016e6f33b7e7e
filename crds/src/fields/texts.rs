//! Texts with a pattern and a length: names, paths, digests.
//!
//! Constructors do not validate: the API server validates texts against the schema's pattern, including
//! those that the operator writes. Patterns use only syntax with the same meaning in Go's RE2 and in ECMA
//! 262.

use std::borrow::Cow;
use std::fmt;

use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::{Deserialize, Serialize};

macro_rules! text {
    ($(#[doc = $doc:literal])+ $name:ident, $lengths:expr, $pattern:literal) => {
        $(#[doc = $doc])+
        #[derive(Clone, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
        #[serde(transparent)]
        pub struct $name(String);

        impl $name {
            /// Creates a text without validation.
            pub fn new(text: impl Into<String>) -> Self {
                $name(text.into())
            }

            /// Returns the text as written.
            pub fn as_str(&self) -> &str {
                &self.0
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(&self.0)
            }
        }

        impl JsonSchema for $name {
            fn inline_schema() -> bool {
                true
            }

            fn schema_name() -> Cow<'static, str> {
                stringify!($name).into()
            }

            fn json_schema(_: &mut SchemaGenerator) -> Schema {
                let (least, most): (u32, u32) = $lengths;
                let description = concat!($($doc),+).trim();
                json_schema!({
                    "type": "string",
                    "description": description,
                    "minLength": least,
                    "maxLength": most,
                    "pattern": $pattern,
                })
            }
        }
    };
}

text!(
    /// Name of a Kubernetes object.
    Name, (1, 253), r"^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$"
);
text!(
    /// Name of an object. Short, because other names are derived from it.
    ShortName, (1, 40), r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$"
);
text!(
    /// Name of a node.
    NodeName, (1, 253), r"^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$"
);
text!(
    /// UID that the API server assigns to an object.
    Uid, (1, 64), r"^[-a-zA-Z0-9]+$"
);
text!(
    /// Key within a Secret or ConfigMap.
    KeyName, (1, 253), r"^[-._a-zA-Z0-9]+$"
);
text!(
    /// Key of a label.
    LabelKey, (1, 317), r"^([a-z0-9]([-a-z0-9.]*[a-z0-9])?/)?[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?$"
);
text!(
    /// Value of a label.
    LabelValue, (0, 63), r"^([A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?)?$"
);
text!(
    /// Address of an etcd member, with its scheme and port.
    Endpoint, (10, 256), r"^https?://[^/:\s]+:[0-9]{1,5}$"
);
text!(
    /// Prefix of keys; begins and ends with a slash.
    KeyPrefix, (1, 128), r"^/([-A-Za-z0-9._]+/)*$"
);
text!(
    /// Pattern of stable device names; `*` and `?` match characters of one path segment.
    DeviceGlob, (17, 200), r"^(/dev/disk/by-id/[-A-Za-z0-9._:+*?]+|/sys/bus/pci/devices/[0-9a-f:.*?]+)$"
);
text!(
    /// Path of a device or file on a node.
    DevicePath, (2, 256), r"^/[^\s]+$"
);
text!(
    /// Absolute path of a directory on a node, without `.` and `..` segments.
    HostPath, (2, 90), r"^(/[-A-Za-z0-9_]+[-A-Za-z0-9._]*)+$"
);
text!(
    /// Mode bits of a socket, octal; the owner can read and write.
    SocketMode, (4, 4), r"^0[67][0-7][0-7]$"
);
text!(
    /// SHA-256 of a text, in hexadecimal.
    Digest, (71, 71), r"^sha256:[0-9a-f]{64}$"
);
text!(
    /// Digest of an image.
    ImageDigest, (71, 71), r"^sha256:[0-9a-f]{64}$"
);
text!(
    /// Image name without tag and digest.
    ImageRepository, (1, 255), r"^[a-zA-Z0-9][-a-zA-Z0-9._:/]*[a-zA-Z0-9]$"
);
text!(
    /// Tag of an image.
    ImageTag, (1, 128), r"^[A-Za-z0-9_][-A-Za-z0-9._]*$"
);
text!(
    /// Reference of an OCI artifact, with its digest.
    OciReference, (73, 400), r"^[a-zA-Z0-9][-a-zA-Z0-9._:/]*@sha256:[0-9a-f]{64}$"
);
text!(
    /// UUID of a GPU, as reported by its driver.
    GpuUuid, (5, 64), r"^(GPU|MIG)-[-0-9a-f]+$"
);
text!(
    /// Address on the PCI bus.
    PciAddress, (12, 12), r"^[0-9a-f]{4}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]$"
);
text!(
    /// Serial number of a device.
    Serial, (1, 64), r"^[!-~]+( [!-~]+)*$"
);
text!(
    /// Amount of CPU: cores, or thousandths of a core with `m`.
    CpuAmount, (1, 8), r"^[0-9]{1,6}m?$"
);
text!(
    /// Filter of the log: a level, or levels by module.
    LogFilter, (1, 256), r"^[-A-Za-z0-9_:=,.]+$"
);
text!(
    /// First frame of published messages.
    Topic, (1, 255), r"^[!-~]+$"
);
text!(
    /// Version of a program.
    Version, (1, 64), r"^[0-9A-Za-z][-+.0-9A-Za-z]*$"
);
text!(
    /// Typed confirmation of something that cannot be undone.
    ConfirmationText, (27, 27), r"^yes-really-destroy-the-data$"
);
text!(
    /// Short text on one line.
    Text, (0, 253), r"^[^\r\n]*$"
);
