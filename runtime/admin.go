package runtime

import "berth/runtime/admin"

// adminService is what the operator can ask for (see package admin): one line
// for each verb.
var adminService = admin.Service(
	admin.Serve(admin.ListImages, (*Service).listImages),
	admin.Serve(admin.InspectImage, (*Service).inspectImage),
	admin.Serve(admin.RemoveImage, (*Service).removeImage),
	admin.Serve(admin.PinImage, (*Service).pinImage),
	admin.Serve(admin.ImportImage, (*Service).importImage),
	admin.Serve(admin.ExportImage, (*Service).exportImage),
	admin.Serve(admin.CheckImages, (*Service).checkImages),
	admin.Serve(admin.DiskUsage, (*Service).diskUsage),
	admin.Serve(admin.Pulls, (*Service).pulls),
	admin.Serve(admin.Why, (*Service).why),
)
